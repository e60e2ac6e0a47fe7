//! `viv freeze`, `viv thaw` and `viv hibernate`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, WaitMs};
use viv_api::client::Change;
use viv_api::sandbox::{RestSandbox, Status};

use super::new::wrong;
use super::progress::Waiting;
use super::{Daemon, ensure, rm, stop};
use crate::fail::{FAILED, Failure};
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ids or names
    #[arg(required = true)]
    sandboxes: Vec<SandboxRef>,
    /// How long to wait for each; 0 does not wait, it goes on all the same
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
}

/// Which of the three.
#[derive(Clone, Copy)]
pub(super) enum Rest {
    Freeze,
    Thaw,
    Hibernate,
}

pub(super) fn run(rest: Rest, args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let request = RestSandbox { wait_ms: Some(WaitMs::new(args.wait).map_err(wrong)?) };
    let (doing, wanted) = match rest {
        Rest::Freeze => ("freezing", Status::Frozen),
        Rest::Thaw => ("thawing", Status::Ready),
        Rest::Hibernate => ("saving", Status::Hibernated),
    };
    rm::each(&args.sandboxes, |named| {
        let changed = {
            let _waiting = Waiting::on(format!("{doing} {named}"));
            let sandbox = daemon.sandbox(named);
            match rest {
                Rest::Freeze => sandbox.freeze(&request)?,
                Rest::Thaw => sandbox.thaw(&request)?,
                Rest::Hibernate => sandbox.hibernate(&request)?,
            }
        };
        let is_done = matches!(changed, Change::Done(_));
        let sandbox = changed.into_sandbox();
        daemon.answer(&sandbox, || format!("{}  {}", sandbox.id, sandbox.status))?;
        if sandbox.status == Status::SaveFailed {
            return Err(stop::not_saved(&sandbox).into());
        }
        if is_done && sandbox.status != wanted {
            let message = format!("{} is {}, not {wanted}", sandbox.id, sandbox.status);
            return Err(Failure::new(FAILED, message).hint(format!("`viv timeline {}` says why", sandbox.id)).into());
        }
        Ok(ensure::verdict(&sandbox, is_done || args.wait == 0, wanted.as_str()))
    })
}
