//! QEMU's monitor, asked for the addresses that devices were given and for what the CPU does.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::Error;

/// A monitor that does not answer within this time is broken.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection to the monitor.
pub struct Monitor {
    reader: BufReader<UnixStream>,
}

impl Monitor {
    /// Waits for the monitor's greeting and makes it take commands.
    pub fn connect(stream: &UnixStream) -> Result<Self, Error> {
        let stream = stream
            .try_clone()
            .map_err(Error::channel("duplicate a socket"))?;
        stream
            .set_read_timeout(Some(PATIENCE))
            .map_err(Error::channel("set a time limit for QEMU's monitor"))?;
        let mut monitor = Self {
            reader: BufReader::new(stream),
        };
        monitor.read()?;
        monitor.ask(&json!({"execute": "qmp_capabilities"}))?;
        Ok(monitor)
    }

    /// The bus addresses of all devices that have an id.
    pub fn addresses(&mut self) -> Result<HashMap<String, String>, Error> {
        let buses = self.ask(&json!({"execute": "query-pci"}))?;
        let mut found = HashMap::new();
        for bus in buses.as_array().into_iter().flatten() {
            collect(bus, &mut found);
        }
        Ok(found)
    }

    /// The registers of all CPUs, as `info registers -a` prints them.
    pub fn registers(&mut self) -> Result<String, Error> {
        let answer = self.ask(&json!({
            "execute": "human-monitor-command",
            "arguments": {"command-line": "info registers -a"}
        }))?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }

    fn ask(&mut self, request: &Value) -> Result<Value, Error> {
        self.reader
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .map_err(Error::channel("write to QEMU's monitor"))?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                return Err(Error::Monitor(format!("{request}: {error}")));
            }
            // Events may come in between.
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn read(&mut self) -> Result<Value, Error> {
        let mut line = String::new();
        self.reader
            .read_line(&mut line)
            .map_err(Error::channel("read from QEMU's monitor"))?;
        serde_json::from_str(&line).map_err(|error| Error::Monitor(format!("{error} in {line:?}")))
    }
}

/// Walks a bus and the buses behind its bridges.
fn collect(bus: &Value, found: &mut HashMap<String, String>) {
    for device in bus
        .get("devices")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let number = |key| device.get(key).and_then(Value::as_u64);
        let id = device.get("qdev_id").and_then(Value::as_str);
        if let (Some(id), Some(bus), Some(slot), Some(function)) =
            (id, number("bus"), number("slot"), number("function"))
        {
            found.insert(
                id.to_owned(),
                format!("0000:{bus:02x}:{slot:02x}.{function}"),
            );
        }
        if let Some(bridge) = device.get("pci_bridge") {
            collect(bridge, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_behind_bridges_are_found() {
        let bus: Value = serde_json::from_str(
            r#"{"bus":0,"devices":[
                {"bus":0,"slot":8,"function":0,"qdev_id":"gpu"},
                {"bus":0,"slot":9,"function":0,"qdev_id":"rp1","pci_bridge":{"bus":{"number":0},"devices":[
                    {"bus":1,"slot":0,"function":1,"qdev_id":"disk"}]}},
                {"bus":0,"slot":31,"function":2,"qdev_id":""}]}"#,
        )
        .unwrap();
        let mut found = HashMap::new();
        collect(&bus, &mut found);
        assert_eq!(found["gpu"], "0000:00:08.0");
        assert_eq!(found["disk"], "0000:01:00.1");
    }
}
