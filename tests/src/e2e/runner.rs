//! Boots the machines, runs the tests in them and reports.

use std::io::Write;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::command;
use crate::e2e::{Config, Outcome, Setting, Test, Verdict};
use crate::error::{self, Error};
use crate::machine::{Boot, Sink, Source, job};
use crate::setup;

/// For a boot of L1 on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// How often a machine is booted again for the tests that it left undone.
const BOOTS: usize = 3;
/// Machines that run at once: each has two CPUs, and its guest uses one.
const MACHINES: usize = 2;
/// Lines of output shown of a test that failed.
const SHOWN: usize = 60;

/// How many tests ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// As expected.
    pub passed: u64,
    /// Otherwise.
    pub failed: u64,
    /// Not run.
    pub skipped: u64,
}

impl Tally {
    /// Both together.
    pub fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Something that takes a machine of its own and is no [`Test`].
pub type Job<'a> = Box<dyn FnOnce() -> Result<Tally, Error> + Send + 'a>;

/// Runs tests, those with equal machines in one boot, and prints how each ended; before them `jobs`. Two machines run at once,
/// unless all that is printed is to be seen.
pub fn run(
    tests: Vec<Test>,
    jobs: Vec<Job>,
    setting: &Setting,
    verbose: bool,
) -> Result<Tally, Error> {
    let groups = groups(tests).into_iter().map(|group| {
        let job = move || run_group(&group, setting, verbose);
        Box::new(job) as Job
    });
    let all = Mutex::new(jobs.into_iter().chain(groups));
    let workers = if verbose { 1 } else { MACHINES };
    let work = || -> Result<Tally, Error> {
        let mut tally = Tally::default();
        loop {
            let next = lock(&all).next();
            let Some(job) = next else {
                return Ok(tally);
            };
            tally.add(job()?);
        }
    };
    let results: Vec<_> = thread::scope(|scope| {
        let started: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        started.into_iter().map(|thread| thread.join()).collect()
    });
    let mut tally = Tally::default();
    for result in results {
        tally.add(result.unwrap_or_else(|panic| resume_unwind(panic))?);
    }
    Ok(tally)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs tests with equal machines.
fn run_group(group: &[Test], setting: &Setting, verbose: bool) -> Result<Tally, Error> {
    let mut tally = Tally::default();
    let mut left: Vec<&Test> = group.iter().collect();
    // A test that brings L1 down takes the others with it: they get another boot. So does one whose emulated CPU hangs, or errs.
    for number in 1..=BOOTS {
        if left.is_empty() {
            break;
        }
        let tests = left.clone();
        boot(&tests, setting, verbose, &mut |report| {
            if number < BOOTS && report.outcome.has_impossible_interrupt() {
                eprintln!(
                    "lab: {}: the emulated CPU delivered an interrupt with interrupts off (docs/lab.md): once more",
                    report.name
                );
                return;
            }
            let test = tests.iter().find(|test| test.name == report.name);
            tally.add(report.show(test));
            left.retain(|test| test.name != report.name);
        })?;
    }
    for test in left {
        println!(
            "test {} ... FAILED\n    the lab's host did not get to it",
            test.name
        );
        tally.failed += 1;
    }
    Ok(tally)
}

/// Runs one test and returns what it printed, and where the logs are.
pub fn single(test: &Test, setting: &Setting, verbose: bool) -> Result<(Outcome, PathBuf), Error> {
    let mut result = None;
    for _ in 0..BOOTS {
        boot(&[test], setting, verbose, &mut |report| {
            result = Some((report.outcome, report.log));
        })?;
        if result.is_some() {
            break;
        }
    }
    result.ok_or_else(|| Error::Failed(format!("the lab's host did not get to {}", test.name)))
}

fn groups(tests: Vec<Test>) -> Vec<Vec<Test>> {
    let mut groups: Vec<Vec<Test>> = Vec::new();
    for test in tests {
        let same = |group: &&mut Vec<Test>| {
            group
                .first()
                .is_some_and(|first| first.config == test.config)
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(test),
            None => groups.push(vec![test]),
        }
    }
    groups
}

/// A test that ran.
struct Report {
    name: String,
    outcome: Outcome,
    elapsed: Duration,
    log: PathBuf,
}

/// Boots the machine of these tests, which is the same, and runs them; `done` gets each that began.
fn boot(
    tests: &[&Test],
    setting: &Setting,
    verbose: bool,
    done: &mut dyn FnMut(Report),
) -> Result<(), Error> {
    let Some(first) = tests.first() else {
        return Ok(());
    };
    let config: &Config = &first.config;
    let mut names = vec![setup::DEFAULT_KERNEL, config.host_kernel()];
    names.extend(tests.iter().filter_map(|test| test.guest_kernel));
    let kernels = setup::ensure(&names)?;
    let (mut machine, variables, _disks) = config.prepare()?;
    let limit = BOOT_LIMIT + tests.iter().map(|test| test.limit).sum::<Duration>();
    machine.timeout = limit.as_secs();
    let boot = Boot {
        machine: &machine,
        kernels: &kernels,
        body: &body(&(setting.variables() + &variables), tests),
        what: "the tests",
        interactive: false,
    };
    let mut reader = Reader::new(verbose, done);
    let result = boot.run(&mut reader);
    if let Err(error @ Error::Hung { .. }) = &result {
        // Not the test's fault: it gets another boot, unless this was the last.
        let test = reader.drop_test();
        eprintln!("lab: {}: {error}", test.as_deref().unwrap_or("no test"));
        return Ok(());
    }
    reader.finish();
    match result {
        Ok(_) => Ok(()),
        Err(error @ (Error::Timeout { .. } | Error::HostDied { .. })) => {
            eprintln!("lab: {}", error::chain(&error));
            Ok(())
        }
        Err(error) => Err(error),
    }
}

fn body(variables: &str, tests: &[&Test]) -> String {
    let mut text = format!("{variables}. resources/lab/e2e.sh\nhold_vm\n");
    for test in tests {
        let script = job::quote(&test.script);
        text.push_str(&format!(
            "lab_test {} {} {script}\n",
            job::quote(test.name),
            test.limit.as_secs()
        ));
    }
    text
}

/// Cuts the stream of L1's output into the outputs of the tests.
struct Reader<'a> {
    verbose: bool,
    log: PathBuf,
    pending: Vec<u8>,
    current: Option<(Report, Instant)>,
    done: &'a mut dyn FnMut(Report),
}

impl Sink for Reader<'_> {
    fn started(&mut self, log: &Path) {
        self.log = log.to_path_buf();
    }

    fn bytes(&mut self, source: Source, bytes: &[u8]) {
        if source == Source::Out {
            self.take(bytes);
        } else {
            // Messages of L1's init: nothing that a test says.
            let _ = std::io::stderr().lock().write_all(bytes);
        }
    }
}

impl<'a> Reader<'a> {
    fn new(verbose: bool, done: &'a mut dyn FnMut(Report)) -> Self {
        Self {
            verbose,
            log: PathBuf::new(),
            pending: Vec::new(),
            current: None,
            done,
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        if self.verbose {
            // A reader of the lab's output that has gone away does not concern the tests.
            let _ = std::io::stdout().lock().write_all(bytes);
        }
        self.pending.extend_from_slice(bytes);
        while let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            self.line(String::from_utf8_lossy(&line).trim_end());
        }
    }

    fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix("@lab begin ") {
            let report = Report {
                name: name.to_owned(),
                outcome: Outcome::default(),
                elapsed: Duration::ZERO,
                log: self.log.clone(),
            };
            self.current = Some((report, Instant::now()));
        } else if let Some(end) = line.strip_prefix("@lab end ") {
            let status = end.rsplit(' ').next().and_then(|word| word.parse().ok());
            self.end(status);
        } else if let Some((report, _)) = &mut self.current {
            if let Some(complaint) = line.strip_prefix("@lab host ") {
                report.outcome.host.push(complaint.to_owned());
            } else {
                report.outcome.output.push_str(line);
                report.outcome.output.push('\n');
            }
        }
    }

    fn end(&mut self, status: Option<u8>) {
        if let Some((mut report, start)) = self.current.take() {
            report.outcome.status = status;
            report.outcome.log = report.log.clone();
            report.elapsed = start.elapsed();
            (self.done)(report);
        }
    }

    /// Forgets the test that began and did not end; its name.
    fn drop_test(&mut self) -> Option<String> {
        self.current.take().map(|(report, _)| report.name)
    }

    /// A test that began and did not end is done as well, without a status.
    fn finish(mut self) {
        self.end(None);
    }
}

impl Report {
    fn verdict(&self, test: &Test) -> Verdict {
        match self.outcome.status {
            None => Err("the lab's host ended during the test".to_owned()),
            Some(124 | 137) => Err(format!("took longer than {} s", test.limit.as_secs())),
            Some(_) => {
                (test.check)(&self.outcome)?;
                let is_fault = |line: &&String| line.contains("DMAR: ") && line.contains("fault");
                let host = &self.outcome.host;
                if test.iommu_faults && !host.iter().any(|line| is_fault(&line)) {
                    return Err("the host's IOMMU refused no DMA".to_owned());
                }
                let mut complaints = host.iter();
                match complaints.find(|line| !(test.iommu_faults && is_fault(line))) {
                    Some(complaint) => Err(format!("the host's kernel complains: {complaint}")),
                    None => Ok(()),
                }
            }
        }
    }

    /// Prints how the test ended, and counts it.
    fn show(&self, test: Option<&&Test>) -> Tally {
        let verdict = match test {
            Some(test) => self.verdict(test),
            None => Err("no such test".to_owned()),
        };
        let seconds = self.elapsed.as_secs_f32();
        match verdict {
            Ok(()) => {
                println!("test {} ... ok ({seconds:.1} s)", self.name);
                Tally {
                    passed: 1,
                    ..Tally::default()
                }
            }
            Err(reason) => {
                // At once: another machine's tests print, too.
                println!(
                    "test {} ... FAILED ({seconds:.1} s)\n    {reason}\n    its output ended so:{}\n    the host's logs: {}",
                    self.name,
                    command::tail(&self.outcome.output, SHOWN),
                    self.log.display()
                );
                Tally {
                    failed: 1,
                    ..Tally::default()
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(name: &'static str, config: Config) -> Test {
        Test::new(name, config, "true", |_| Ok(()))
    }

    #[test]
    fn equal_machines_share_a_boot() {
        let gpus = || Config::default().gpus(1, "1G");
        let groups = groups(vec![
            test("a::1", gpus()),
            test("a::2", Config::default()),
            test("a::3", gpus()),
        ]);
        let names: Vec<Vec<_>> = groups
            .iter()
            .map(|group| group.iter().map(|test| test.name).collect())
            .collect();
        assert_eq!(names, [vec!["a::1", "a::3"], vec!["a::2"]]);
    }

    #[test]
    fn output_is_cut_at_the_markers_however_it_arrives() {
        let text = "noise\n@lab begin a::1\none\r\ntwo\n@lab host WARNING: x\n@lab end a::1 3\n@lab begin a::2\ncut off";
        for size in [1, 7, 1000] {
            let mut reports = Vec::new();
            let mut done = |report| reports.push(report);
            let mut reader = Reader::new(false, &mut done);
            text.as_bytes()
                .chunks(size)
                .for_each(|chunk| reader.take(chunk));
            reader.finish();
            assert_eq!(reports[0].outcome.output, "one\ntwo\n");
            assert_eq!(reports[0].outcome.status, Some(3));
            assert_eq!(reports[0].outcome.host, ["WARNING: x"]);
            assert_eq!(reports[1].outcome.status, None);
        }
    }

    #[test]
    fn a_complaint_of_the_host_fails_a_test() {
        let report = Report {
            name: "a::1".to_owned(),
            outcome: Outcome {
                status: Some(0),
                host: vec!["DMAR: fault".to_owned()],
                ..Outcome::default()
            },
            elapsed: Duration::ZERO,
            log: PathBuf::new(),
        };
        let test = test("a::1", Config::default());
        assert!(report.verdict(&test).unwrap_err().contains("DMAR"));
    }

    #[test]
    fn a_test_of_refused_dma_needs_a_fault_and_bears_nothing_else() {
        let verdict = |host: &[&str]| {
            let report = Report {
                name: "a::1".to_owned(),
                outcome: Outcome {
                    status: Some(0),
                    host: host.iter().map(|line| (*line).to_owned()).collect(),
                    ..Outcome::default()
                },
                elapsed: Duration::ZERO,
                log: PathBuf::new(),
            };
            report.verdict(&test("a::1", Config::default()).with_iommu_faults())
        };
        let fault = "DMAR: [DMA Write NO_PASID] Request device [00:03.0] fault addr 0x400000000";
        assert!(verdict(&[]).is_err());
        assert!(verdict(&[fault]).is_ok());
        assert!(verdict(&[fault, "WARNING: x"]).is_err());
    }
}
