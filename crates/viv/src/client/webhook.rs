//! `viv webhook`

use std::process::ExitCode;

use clap::Subcommand;
use viv_api::bound::{
    EventKind, EventKinds, LabelFilter, Labels, Note, ProjectName, SandboxRef, SecretOverlapMs, Sequence, WebhookRef,
    WebhookUrl,
};
use viv_api::subscription::{
    ChangeSubscription, CreateSubscription, CreatedSubscription, EventDelivery, ReplayEvents, RotateSecret,
    Subscription,
};

use super::new::wrong;
use super::table::{Facts, NONE, Table, age, clock, until};
use super::{Daemon, now_ms, print, print_json, width};
use crate::fail::Failure;
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(visible_alias = "create")]
    Add(Add),
    Set(Set),
    /// List webhooks, with what waits and what is dead
    Ls,
    /// Show a webhook, and what it has not sent
    Show {
        /// Its id
        webhook: WebhookRef,
    },
    /// Take webhooks away, with what they have not sent
    Rm {
        /// Their ids
        #[arg(required = true)]
        webhooks: Vec<WebhookRef>,
    },
    /// Send events again; what happened meanwhile is sent too
    Enable {
        /// Their ids
        #[arg(required = true)]
        webhooks: Vec<WebhookRef>,
    },
    /// Send nothing for now
    Disable {
        /// Their ids
        #[arg(required = true)]
        webhooks: Vec<WebhookRef>,
    },
    /// Give a webhook another secret, and say it this once
    Rotate {
        /// Its id
        webhook: WebhookRef,
        /// How long the secret before is signed with too
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "24h")]
        overlap: u64,
    },
    /// Send a test, once and now
    Test {
        /// Its id
        webhook: WebhookRef,
    },
    /// List dead letters: events that are not tried any more
    Dead {
        /// Its id
        webhook: WebhookRef,
    },
    /// Send dead letters once more, or everything after a place in the journal
    Replay {
        /// Its id
        webhook: WebhookRef,
        /// Everything after this place (0 for all that is kept)
        #[arg(long, value_name = "SEQ", conflicts_with = "seq")]
        after: Option<Sequence>,
        /// This dead letter only
        #[arg(long, value_name = "SEQ")]
        seq: Option<Sequence>,
    },
}

/// Have events sent to a URL, and say the secret that they are signed with this once
///
/// Events about one sandbox come in order and at least once; what is not taken is tried again for hours, and kept as a
/// dead letter then.
#[derive(clap::Args)]
struct Add {
    /// Only this kind, such as sandbox.moved, or sandbox for all that begin so
    #[arg(long, short, value_name = "KIND")]
    kind: Vec<EventKind>,
    /// Only those about this sandbox
    #[arg(long, value_name = "SANDBOX")]
    sandbox: Option<SandboxRef>,
    /// Only those about sandboxes with this label
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// Of which project; the one of the configuration, or the caller's, when not said
    #[arg(long, conflicts_with = "all_projects")]
    project: Option<ProjectName>,
    /// Of all projects and of the installation, alerts among them
    #[arg(long)]
    all_projects: bool,
    /// Also those after this place in the journal (0 for all that is kept)
    #[arg(long, value_name = "SEQ")]
    after: Option<Sequence>,
    /// What it is for
    #[arg(long)]
    note: Option<Note>,
    /// To where
    #[arg(value_name = "URL")]
    to: WebhookUrl,
}

/// Change a webhook; what is not said stays
#[derive(clap::Args)]
struct Set {
    /// To where, also what waits
    #[arg(long, value_name = "URL")]
    to: Option<WebhookUrl>,
    /// Only these kinds, instead of those before
    #[arg(long, short, value_name = "KIND", conflicts_with = "all_kinds")]
    kind: Vec<EventKind>,
    /// All kinds
    #[arg(long)]
    all_kinds: bool,
    /// Only sandboxes with these labels, instead of those before
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// What it is for
    #[arg(long)]
    note: Option<Note>,
    /// Its id
    webhook: WebhookRef,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    match args.verb {
        Verb::Add(add) => self::add(add, daemon),
        Verb::Set(set) => self::set(set, daemon),
        Verb::Ls => list(daemon),
        Verb::Show { webhook } => show(&webhook, daemon),
        Verb::Rm { webhooks } => {
            for webhook in webhooks {
                daemon.client.remove_webhook(&webhook)?;
                daemon.answer(&serde_json::json!({ "removed": webhook }), || webhook.to_string())?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Verb::Enable { webhooks } => switch(&webhooks, true, daemon),
        Verb::Disable { webhooks } => switch(&webhooks, false, daemon),
        Verb::Rotate { webhook, overlap } => {
            let overlap_ms = Some(SecretOverlapMs::new(overlap).map_err(wrong)?);
            tell_secret(&daemon.client.rotate_webhook(&webhook, &RotateSecret { overlap_ms })?, daemon)
        }
        Verb::Test { webhook } => {
            let tried = daemon.client.test_webhook(&webhook)?;
            if daemon.json {
                return print_json(&tried);
            }
            match tried.why {
                None => print("taken"),
                Some(why) => Err(Failure::new(crate::fail::FAILED, format!("it was not taken: {why}")).into()),
            }
        }
        Verb::Dead { webhook } => dead(&webhook, daemon),
        Verb::Replay { webhook, after, seq } => {
            let replayed = daemon.client.replay_webhook(&webhook, &ReplayEvents { after, seq })?;
            daemon.answer(&replayed, || match after {
                Some(_) => "on their way".to_owned(),
                None => format!("{} on their way", replayed.revived),
            })
        }
    }
}

fn labels(filters: Vec<LabelFilter>) -> anyhow::Result<Labels> {
    Ok(Labels::new(filters.into_iter().map(|filter| (filter.key, filter.value)).collect()).map_err(wrong)?)
}

fn add(add: Add, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let configured = || daemon.project.clone().filter(|_| !add.all_projects).map(ProjectName::new).transpose();
    let request = CreateSubscription {
        url: add.to,
        note: add.note,
        kinds: EventKinds::new(add.kind).map_err(wrong)?,
        sandbox: add.sandbox,
        labels: labels(add.label)?,
        project: add.project.map_or_else(configured, |project| Ok(Some(project))).map_err(wrong)?,
        all_projects: add.all_projects,
        after: add.after,
    };
    tell_secret(&daemon.client.create_webhook(&request)?, daemon)
}

fn tell_secret(created: &CreatedSubscription, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    if !daemon.json {
        eprintln!("{}: this is the only time that its secret is told", created.webhook.id);
    }
    daemon.answer(created, || created.secret.clone())
}

fn set(set: Set, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let kinds = (set.all_kinds || !set.kind.is_empty()).then(|| EventKinds::new(set.kind)).transpose();
    let change = ChangeSubscription {
        url: set.to,
        note: set.note,
        kinds: kinds.map_err(wrong)?,
        labels: if set.label.is_empty() { None } else { Some(labels(set.label)?) },
        enabled: None,
    };
    if change == ChangeSubscription::default() {
        let hint = "say what is to be otherwise: --to, --kind, --all-kinds, --label, --note";
        return Err(Failure::usage("nothing is to be changed").hint(hint).into());
    }
    let webhook = daemon.client.change_webhook(&set.webhook, &change)?;
    daemon.answer(&webhook, || webhook.id.to_string())
}

fn switch(webhooks: &[WebhookRef], enabled: bool, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    for webhook in webhooks {
        let change = ChangeSubscription { enabled: Some(enabled), ..ChangeSubscription::default() };
        let webhook = daemon.client.change_webhook(webhook, &change)?;
        daemon.answer(&webhook, || webhook.id.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn list(daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut table = Table::new(&["ID", "DESTINATION", "PROJECT", "STATE", "WAITING", "DEAD", "AGE", "EVENTS", "NOTE"]);
    for webhook in daemon.client.webhooks_all() {
        let webhook = webhook?;
        if daemon.json {
            print_json(&webhook)?;
            continue;
        }
        table.row([
            webhook.id.to_string(),
            webhook.destination.clone(),
            webhook.project.clone().unwrap_or_else(|| "all".to_owned()),
            state(&webhook).to_owned(),
            webhook.waiting.to_string(),
            webhook.dead.to_string(),
            age(now_ms(), Some(webhook.created_at_ms)),
            events(&webhook),
            webhook.note.clone().unwrap_or_else(|| NONE.to_owned()),
        ]);
    }
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn state(webhook: &Subscription) -> &'static str {
    if webhook.enabled { "enabled" } else { "disabled" }
}

/// What is wanted, in words.
fn events(webhook: &Subscription) -> String {
    let kinds = if webhook.kinds.is_empty() { vec!["all".to_owned()] } else { webhook.kinds.clone() };
    let labels = webhook.labels.iter().map(|(key, value)| format!("{key}={value}"));
    let sandbox = webhook.sandbox.iter().map(ToString::to_string);
    kinds.into_iter().chain(sandbox).chain(labels).collect::<Vec<_>>().join(" ")
}

fn show(webhook: &WebhookRef, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let shown = daemon.client.webhook(webhook)?;
    if daemon.json {
        return print_json(&shown);
    }
    let now_ms = now_ms();
    let mut facts = Facts::default();
    facts.add("id", shown.id.to_string());
    facts.add("destination", shown.destination.clone());
    facts.maybe("note", shown.note.clone());
    facts.add("project", shown.project.clone().unwrap_or_else(|| "all, and the installation".to_owned()));
    facts.add("events", events(&shown));
    facts.add("state", state(&shown));
    facts.add("made", format!("{} ago by {}", age(now_ms, Some(shown.created_at_ms)), shown.created_by));
    let before = shown.secret_before_until_ms.filter(|until_ms| *until_ms > now_ms);
    facts.maybe("old secret", before.map(|until_ms| format!("signed with too {}", until(now_ms, until_ms))));
    facts.add("journal", format!("looked at up to {}", shown.after));
    facts.add("waiting", shown.waiting.to_string());
    facts.add("dead", shown.dead.to_string());
    if let Some(oldest) = daemon.client.webhook_deliveries(webhook, false).next().transpose()? {
        facts.add("oldest", oldest_words(&oldest, now_ms));
    }
    print(&facts.render())
}

fn oldest_words(oldest: &EventDelivery, now_ms: u64) -> String {
    let why = oldest.last_error.as_ref().map_or_else(String::new, |why| format!(", {why}"));
    let next = oldest.next_at_ms.map_or_else(String::new, |at_ms| format!(", next {}", until(now_ms, at_ms)));
    format!("event {}, tried {} times{why}{next}", oldest.seq, oldest.attempts)
}

fn dead(webhook: &WebhookRef, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut table = Table::new(&["SEQ", "SANDBOX", "TRIES", "SINCE", "DIED", "WHY"]);
    for letter in daemon.client.webhook_deliveries(webhook, true) {
        let letter = letter?;
        if daemon.json {
            print_json(&letter)?;
            continue;
        }
        table.row([
            letter.seq.to_string(),
            letter.sandbox.as_ref().map_or_else(|| NONE.to_owned(), ToString::to_string),
            letter.attempts.to_string(),
            clock(letter.since_at_ms),
            letter.dead_at_ms.map_or_else(|| NONE.to_owned(), clock),
            letter.last_error.clone().unwrap_or_else(|| NONE.to_owned()),
        ]);
    }
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}
