//! Running a program from which the kernel keeps an ioctl, as an older kernel or one built otherwise does.

use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

use crate::error::Error;

/// The system call's number on x86-64.
const SYS_IOCTL: i64 = 16;
/// The argument that holds the request.
const REQUEST: u8 = 1;
/// What the kernel answers to an ioctl that it does not know.
const ENOTTY: u32 = 25;

/// Becomes `command`, whose ioctls of number `request` end with ENOTTY; returns when that fails.
pub fn run(request: u32, command: &[String]) -> Error {
    let Some((program, arguments)) = command.split_first() else {
        return Error::Usage("no command was given".to_owned());
    };
    let refused = filter(request)
        .map_err(|error| error.to_string())
        .and_then(|filter| apply_filter(&filter).map_err(|error| error.to_string()));
    if let Err(reason) = refused {
        return Error::Failed(format!("ioctl {request:#x} cannot be kept away: {reason}"));
    }
    Error::Start {
        program: program.clone(),
        source: Command::new(program).args(arguments).exec(),
    }
}

fn filter(request: u32) -> Result<BpfProgram, BackendError> {
    let is_request = SeccompCondition::new(
        REQUEST,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        request.into(),
    )?;
    let rules = vec![SeccompRule::new(vec![is_request])?];
    SeccompFilter::new(
        [(SYS_IOCTL, rules)].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(ENOTTY),
        TargetArch::x86_64,
    )?
    .try_into()
}
