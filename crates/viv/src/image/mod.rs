//! `viv image`: what sandboxes are made of.

mod progress;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use viv_core::SnapshotId;
use viv_image::{Credentials, Options, Reference, Registry};
use viv_sandbox::{Destination, ExportSource, LocalProvider, StoreError};

use crate::place::Place;
use crate::settings::Global;
use crate::text::{bytes, say};
use progress::Shown;

/// Exit code of a check that found damage.
const DAMAGED: u8 = 1;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    verb: Verb,
}

/// The same below `viv local`, where the place was named before.
#[derive(clap::Args)]
pub(crate) struct ByHand {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// List images
    Ls,
    /// Bring in a root filesystem (tar), an OCI archive or layout, or what `docker save` wrote
    Import {
        /// A file or folder; tars may be packed with gzip or zstd
        path: PathBuf,
        /// What to call it here
        #[arg(long)]
        name: Option<String>,
        /// Which one, in an archive that holds several
        #[arg(long)]
        which: Option<String>,
    },
    /// Fetch an image from a registry; a broken download goes on where it was
    Pull {
        /// Such as debian:12, or localhost:5000/mine@sha256:…
        reference: Reference,
        /// What to call it here
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        registry: RegistryArgs,
    },
    /// Send an image or a snapshot to a registry
    Push {
        /// An image's name or a snapshot's id
        source: String,
        /// Where to, such as localhost:5000/mine:1
        reference: Reference,
        #[command(flatten)]
        registry: RegistryArgs,
    },
    /// Write an image or a snapshot as an OCI image, which `docker load` reads too
    Export {
        /// An image's name or a snapshot's id
        source: String,
        /// The file to write
        path: PathBuf,
        /// Write a folder in OCI's layout instead
        #[arg(long)]
        layout: bool,
        /// What the image is called in the archive
        #[arg(long)]
        name: Option<Reference>,
    },
    /// Take images away; what sandboxes or snapshots stand on stays
    Rm {
        #[arg(required = true)]
        names: Vec<String>,
        /// Take the name away although the image is in use
        #[arg(long)]
        force: bool,
    },
    /// Show all that is known about an image
    Inspect { name: String },
    /// Take away what nothing refers to, hash what was not hashed yet, shorten chains of layers
    Gc,
    /// Look whether everything that was kept is there and whole
    Check {
        /// Read the content of every file too
        #[arg(long)]
        deep: bool,
    },
}

#[derive(clap::Args)]
struct RegistryArgs {
    /// A registry that is spoken to without encryption, besides those on this machine
    #[arg(long, value_name = "HOST")]
    plain_http: Vec<String>,
    /// A docker config.json with credentials
    #[arg(long, value_name = "FILE", env = "VIV_REGISTRY_AUTH", hide_env_values = true)]
    auth_file: Option<PathBuf>,
    /// Certificates to trust besides the machine's
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
}

impl RegistryArgs {
    fn client(self) -> anyhow::Result<Registry> {
        let credentials = match &self.auth_file {
            Some(file) => Credentials::from_docker_config(file)?,
            None => Credentials::default(),
        };
        let plain_http = self.plain_http.into_iter().collect();
        Ok(Registry::new(Options { credentials, plain_http, extra_ca_file: self.ca_file, ..Options::default() })?)
    }
}

/// `viv image`: for the daemon of this machine, whether it runs or not.
pub(crate) fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let provider = args.place.open(global.daemons()?)?;
    run_verb(&provider, args.verb, global.json).map_err(with_hint)
}

/// `viv local image`: for sandboxes made by hand.
pub(crate) fn run_by_hand(provider: &LocalProvider, args: ByHand, json: bool) -> anyhow::Result<ExitCode> {
    run_verb(provider, args.verb, json).map_err(with_hint_by_hand)
}

fn run_verb(provider: &LocalProvider, verb: Verb, json: bool) -> anyhow::Result<ExitCode> {
    let shown = Shown::default();
    match verb {
        Verb::Ls => list(provider, json),
        Verb::Import { path, name, which } => {
            let image = provider.import_image(&path, name.as_deref(), which.as_deref(), &|told| shown.tell(told))?;
            say(image.name)
        }
        Verb::Pull { reference, name, registry } => {
            let client = registry.client()?;
            let image = provider.pull_image(&client, &reference, name.as_deref(), &|told| shown.tell(told))?;
            shown.done();
            say(image.name)
        }
        Verb::Push { source, reference, registry } => {
            let client = registry.client()?;
            let to = Destination::Registry(&client, &reference);
            let digest = provider.export_oci(&source_of(source), None, to, &|told| shown.tell(told))?;
            shown.done();
            say(digest)
        }
        Verb::Export { source, path, layout, name } => {
            let to = if layout { Destination::Layout(&path) } else { Destination::Archive(&path) };
            say(provider.export_oci(&source_of(source), name, to, &|told| shown.tell(told))?)
        }
        Verb::Rm { names, force } => {
            for name in names {
                provider.remove_image(&name, force)?;
                say(name)?;
            }
            tidy(provider);
            Ok(ExitCode::SUCCESS)
        }
        Verb::Inspect { name } => {
            let record = provider.image_record(&name)?;
            say(if json { serde_json::to_string(&record)? } else { serde_json::to_string_pretty(&record)? })
        }
        Verb::Gc => {
            let done = tidy(provider);
            // By hand, what was asked for was not done.
            anyhow::ensure!(done.failed.is_empty(), "not everything could be done");
            let Some(found) = done.collected else {
                eprintln!("nothing was removed: somebody is saving or importing\nhint: try again when that is done");
                return Ok(ExitCode::SUCCESS);
            };
            say(format_args!(
                "{} layers ({}) and {} leftovers removed, {} hashed, {} chains shortened",
                found.layers,
                bytes(found.bytes),
                found.leftovers,
                done.hashed,
                done.merged
            ))
        }
        Verb::Check { deep } => check(provider, deep, json),
    }
}

fn tidy(provider: &LocalProvider) -> viv_sandbox::Tidied {
    let done = provider.tidy();
    for failed in &done.failed {
        eprintln!("not done: {failed}");
    }
    done
}

/// A snapshot's id, or an image's name.
fn source_of(text: String) -> ExportSource {
    match text.parse::<SnapshotId>() {
        Ok(id) => ExportSource::Snapshot(id),
        Err(_) => ExportSource::Image(text),
    }
}

fn list(provider: &LocalProvider, json: bool) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    for (name, record) in provider.images()? {
        match record {
            Ok(record) if json => writeln!(out, "{}", serde_json::to_string(&record)?)?,
            Ok(record) => writeln!(
                out,
                "{:<40}  {:>10}  {:>3} layers  {}",
                record.name,
                bytes(record.size_bytes),
                record.layers.len(),
                record.digest
            )?,
            Err(error) => eprintln!("not listed: {name}: {error}"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(provider: &LocalProvider, deep: bool, json: bool) -> anyhow::Result<ExitCode> {
    let checked = provider.check_store(deep)?;
    if json {
        say(serde_json::to_string(&checked)?)?;
    } else {
        for line in &checked.damage {
            say(format_args!("damaged: {line}"))?;
        }
        for line in &checked.unreadable {
            say(format_args!("cannot be looked at: {line}"))?;
        }
        for line in &checked.leftovers {
            say(format_args!("left over: {line}"))?;
        }
        let verdict = if checked.is_clean() { "clean" } else { "not clean" };
        say(format_args!(
            "{verdict}: {} layers, {} snapshots, {} images",
            checked.layers, checked.snapshots, checked.images
        ))?;
    }
    Ok(ExitCode::from(if checked.is_clean() { 0 } else { DAMAGED }))
}

/// What the library knows to say about an error is shown below it.
fn with_hint(error: anyhow::Error) -> anyhow::Error {
    hinted(error, |hint| hint)
}

/// The same for sandboxes made by hand, whose images are listed and checked by other words.
pub(crate) fn with_hint_by_hand(error: anyhow::Error) -> anyhow::Error {
    hinted(error, |hint| hint.replace("`viv image ", "`viv local image "))
}

fn hinted(error: anyhow::Error, words: impl FnOnce(String) -> String) -> anyhow::Error {
    match error.downcast_ref::<StoreError>().and_then(StoreError::hint) {
        Some(hint) => anyhow::anyhow!("{error:#}\nhint: {}", words(hint)),
        None => error,
    }
}
