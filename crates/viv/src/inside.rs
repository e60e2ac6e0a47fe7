//! When this binary came into a sandbox with the userland that it was made of: there it is not the one that asks.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;

/// The command of those inside, which reaches the daemon through the sandbox's agent.
const INSIDE: &str = "/.vivarium/bin/viv";

/// Becomes that command if it is meant: nobody inside says where a daemon is.
pub(crate) fn hand_over() {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if is_meant(&arguments, std::env::var_os("VIV_URL").is_some()) && Path::new(INSIDE).exists() {
        // It cannot be started: then it is said what this one finds.
        let _ = std::process::Command::new(INSIDE).args(&arguments).exec();
    }
}

fn is_meant(arguments: &[OsString], has_url: bool) -> bool {
    let mut words = arguments.iter().filter_map(|word| word.to_str()).skip_while(|word| *word == "--json");
    !has_url && words.next() == Some("schedule") && !words.any(|word| word.starts_with("--url"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_asked_inside_is_handed_over() {
        let meant = |line: &str| is_meant(&line.split(' ').map(OsString::from).collect::<Vec<_>>(), false);
        assert!(meant("schedule ls") && meant("--json schedule ls"));
        assert!(!meant("ps") && !meant("exec box schedule") && !meant("schedule ls --url http://x"));
        assert!(!is_meant(&["schedule".into()], true));
    }
}
