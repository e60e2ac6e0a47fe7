//! When this binary came into a sandbox with the userland that it was made of: there it is not the one that asks.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;

use viv_core::inside::InsideVerb;

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
    let mut words = arguments.iter().filter_map(|word| word.to_str());
    let verb = loop {
        match words.next() {
            Some("--json") => {}
            Some("--wait") => drop(words.next()),
            Some(word) if word.starts_with("--wait=") => {}
            word => break word.and_then(InsideVerb::of),
        }
    };
    // What means nothing outside is meant for inside, whatever follows: that is the command behind the gate.
    verb.is_some_and(|verb| !verb.is_outside() || !has_url && !words.any(|word| word.starts_with("--url")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_asked_inside_is_handed_over() {
        let meant = |line: &str| is_meant(&line.split(' ').map(OsString::from).collect::<Vec<_>>(), false);
        assert!(meant("schedule ls") && meant("--json schedule ls") && meant("--wait 5s --json schedule ls"));
        assert!(!meant("ps") && !meant("exec box schedule") && !meant("schedule ls --url http://x"));
        assert!(!is_meant(&["schedule".into()], true));
    }

    #[test]
    fn k5_whatever_the_agent_of_a_task_says_is_handed_over() {
        let meant = |line: &str| is_meant(&line.split(' ').map(OsString::from).collect::<Vec<_>>(), true);
        assert!(meant("step --session one begun") && meant("--wait=5s step"));
        assert!(meant("gate -- curl --url http://x") && meant("gate --effect push git push"));
        assert!(!meant("exec box gate"));
        for verb in InsideVerb::ALL {
            assert!(is_meant(&[verb.as_str().into()], false), "{verb:?}");
        }
    }
}
