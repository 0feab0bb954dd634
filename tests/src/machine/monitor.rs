//! QEMU's monitor, asked for the addresses that devices were given.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::Value;

use crate::error::Error;

/// A monitor that does not answer within this time is broken.
const PATIENCE: Duration = Duration::from_secs(30);

/// The bus addresses of all devices that have an id.
pub fn addresses(stream: &UnixStream) -> Result<HashMap<String, String>, Error> {
    stream
        .set_read_timeout(Some(PATIENCE))
        .map_err(Error::channel("set a time limit for QEMU's monitor"))?;
    let mut reader = BufReader::new(stream);
    // The greeting.
    read(&mut reader)?;
    ask(stream, &mut reader, "qmp_capabilities")?;
    let buses = ask(stream, &mut reader, "query-pci")?;
    let mut found = HashMap::new();
    for bus in buses.as_array().into_iter().flatten() {
        collect(bus, &mut found);
    }
    Ok(found)
}

fn ask(mut stream: &UnixStream, reader: &mut impl BufRead, command: &str) -> Result<Value, Error> {
    let request = format!("{{\"execute\":\"{command}\"}}\n");
    stream
        .write_all(request.as_bytes())
        .map_err(Error::channel("write to QEMU's monitor"))?;
    loop {
        let mut answer = read(reader)?;
        if let Some(error) = answer.get("error") {
            return Err(Error::Monitor(format!("{command}: {error}")));
        }
        // Events may come in between.
        if let Some(value) = answer.get_mut("return") {
            return Ok(value.take());
        }
    }
}

fn read(reader: &mut impl BufRead) -> Result<Value, Error> {
    let mut line = String::new();
    reader
        .read_line(&mut line)
        .map_err(Error::channel("read from QEMU's monitor"))?;
    serde_json::from_str(&line).map_err(|error| Error::Monitor(format!("{error} in {line:?}")))
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
