//! `viv key`

use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};
use viv_api::bound::{Cursor, KeyId, KeyLifetimeMs, KeyName, ProjectName};
use viv_api::key::{CreateKey, Key, Scope};
use viv_api::query::PageQuery;

use super::new::{wrong, wrong_span};
use super::table::{NONE, Table, age, until};
use super::{Daemon, now_ms, print, print_json, width};
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Make a key, and say its secret this once
    Create {
        /// Its name, for people
        name: KeyName,
        /// What it allows
        #[arg(long, value_enum, default_value_t = ScopeArg::Project)]
        scope: ScopeArg,
        /// In which project; the one of the configuration, or the caller's, when not said
        #[arg(long)]
        project: Option<ProjectName>,
        /// For how long it is good, such as 30d; for ever when not said
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        lifetime: Option<u64>,
    },
    /// List keys, without their secrets
    Ls,
    /// Revoke keys
    Revoke {
        /// Ids, not secrets
        #[arg(required = true)]
        keys: Vec<KeyId>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum ScopeArg {
    /// Everything, in every project
    Admin,
    /// Everything about one project's sandboxes
    Project,
    /// Reading about one project's sandboxes
    ReadOnly,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    match args.verb {
        Verb::Create { name, scope, project, lifetime } => {
            let configured = || daemon.project.clone().map(ProjectName::new).transpose();
            let request = CreateKey {
                name,
                scope: match scope {
                    ScopeArg::Admin => Scope::Admin,
                    ScopeArg::Project => Scope::Project,
                    ScopeArg::ReadOnly => Scope::ReadOnly,
                },
                project: project.map_or_else(configured, |project| Ok(Some(project))).map_err(wrong)?,
                lifetime_ms: lifetime.map(KeyLifetimeMs::new).transpose().map_err(wrong_span)?,
            };
            let created = daemon.client.create_key(&request)?;
            if !daemon.json {
                eprintln!("{}: this is the only time that its secret is told", created.key.id);
            }
            daemon.answer(&created, || created.secret.clone())
        }
        Verb::Ls => list(daemon),
        Verb::Revoke { keys } => {
            for key in keys {
                daemon.client.revoke_key(&key)?;
                daemon.answer(&serde_json::json!({ "revoked": key }), || key.to_string())?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn list(daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut table = Table::new(&["ID", "NAME", "SCOPE", "PROJECT", "AGE", "USED", "ENDS"]);
    let mut cursor = None;
    loop {
        let page = daemon.client.keys(&PageQuery { cursor, limit: None })?;
        for key in &page.items {
            if daemon.json {
                print_json(key)?;
            } else {
                table.row(row(key, now_ms()));
            }
        }
        cursor = page.next.map(Cursor::new).transpose().map_err(wrong)?;
        if cursor.is_none() {
            break;
        }
    }
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn row(key: &Key, now_ms: u64) -> [String; 7] {
    let scope = match key.scope {
        Scope::Admin => "admin",
        Scope::Project => "project",
        Scope::ReadOnly => "read_only",
    };
    let ends = match (key.revoked_at_ms, key.expires_at_ms) {
        (Some(_), _) => "revoked".to_owned(),
        (None, Some(at_ms)) => until(now_ms, at_ms),
        (None, None) => NONE.to_owned(),
    };
    [
        key.id.to_string(),
        key.name.clone(),
        scope.to_owned(),
        key.project.clone(),
        age(now_ms, Some(key.created_at_ms)),
        age(now_ms, key.last_used_at_ms),
        ends,
    ]
}
