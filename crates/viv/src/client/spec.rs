//! A file that says what a sandbox is to be: the body of a create, as JSON or TOML, with options over it.

use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};
use viv_api::bound::{BoundError, Env, Port, ServiceName, Word, Words};
use viv_api::sandbox::CreateSandbox;
use viv_api::service::{ReadyWhen, Restart, Service};

use super::new::wrong;
use crate::fail::Failure;

/// More than any body that a daemon takes.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Reads a file; `-` is standard input. Names that end in `.toml` are TOML, everything else is JSON.
pub(super) fn read(path: &Path) -> Result<Value, Failure> {
    let shown = path.display();
    let unreadable = |error: std::io::Error| Failure::usage(format!("cannot read {shown}: {error}"));
    let mut text = String::new();
    if path.as_os_str() == "-" {
        std::io::stdin().lock().take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(unreadable)?;
    } else {
        let file = std::fs::File::open(path).map_err(unreadable)?;
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(unreadable)?;
    }
    let is_toml = path.extension().is_some_and(|extension| extension == "toml");
    let body: Value = if is_toml {
        toml::from_str(&text).map_err(|error| Failure::usage(format!("{shown} is not right: {error}")))?
    } else {
        let hint = "it is the body of a create (docs/api.md): JSON, or TOML in a file whose name ends in .toml";
        serde_json::from_str(&text)
            .map_err(|error| Failure::usage(format!("{shown} is no JSON: {error}")).hint(hint))?
    };
    if !body.is_object() {
        return Err(Failure::usage(format!("{shown} holds no object")).hint("{\"name\": \"box\"} is one"));
    }
    // What is wrong is told before anything is asked of a daemon, with its place.
    parse(&body, path)?;
    Ok(body)
}

fn parse(body: &Value, path: &Path) -> Result<CreateSandbox, Failure> {
    viv_api::request::parse_value(body)
        .map_err(|error| Failure::usage(format!("{} is not right: {}", path.display(), error.message)))
}

/// What the file says, with what the options say over it: values take the place of values, lists go on.
pub(super) fn over(file: Value, options: &CreateSandbox, path: &Path) -> anyhow::Result<CreateSandbox> {
    let mut all = file;
    lay(&mut all, serde_json::to_value(options)?);
    Ok(parse(&all, path)?)
}

fn lay(below: &mut Value, above: Value) {
    match (below, above) {
        (_, Value::Null) => {}
        (Value::Object(below), Value::Object(above)) => lay_fields(below, above),
        (Value::Array(below), Value::Array(above)) => below.extend(above),
        (below, above) => *below = above,
    }
}

fn lay_fields(below: &mut Map<String, Value>, above: Map<String, Value>) {
    for (name, value) in above {
        match below.get_mut(&name) {
            Some(known) => lay(known, value),
            None => {
                below.insert(name, value);
            }
        }
    }
}

/// `NAME=COMMAND` as a service that a shell runs, ready as one of `NAME=PORT` or `NAME=COMMAND` says.
pub(super) fn services(services: &[String], readies: &[String]) -> Result<Vec<Service>, Failure> {
    let mut all = Vec::with_capacity(services.len());
    for text in services {
        let (name, line) = split(text, "--service")?;
        all.push(Service {
            name: ServiceName::new(name).map_err(wrong)?,
            argv: shell(line).map_err(wrong)?,
            env: Env::default(),
            cwd: None,
            user: None,
            ready: None,
            ready_within_ms: None,
            restart: Restart::default(),
            nudge: None,
        });
    }
    for text in readies {
        let (name, how) = split(text, "--ready")?;
        let service = all.iter_mut().find(|service| service.name.as_str() == name);
        let service = service.ok_or_else(|| {
            Failure::usage(format!("--ready names {name:?}, and there is no such service"))
                .hint("--service NAME=COMMAND --ready NAME=PORT")
        })?;
        service.ready = Some(match how.parse::<u64>() {
            Ok(port) => ReadyWhen::Port(Port::new(port).map_err(wrong)?),
            Err(_) => ReadyWhen::Command(shell(how).map_err(wrong)?),
        });
    }
    Ok(all)
}

fn split<'t>(text: &'t str, option: &str) -> Result<(&'t str, &'t str), Failure> {
    let parts = text.split_once('=').filter(|(name, rest)| !name.is_empty() && !rest.is_empty());
    parts.ok_or_else(|| Failure::usage(format!("{option} wants NAME=SOMETHING")).hint("--service 'web=./serve.sh'"))
}

fn shell(line: &str) -> Result<Words, BoundError> {
    let words = ["sh", "-c", line].into_iter().map(Word::new).collect::<Result<Vec<_>, _>>()?;
    Words::new(words)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn options_go_over_a_file() {
        let file =
            json!({"name": "a", "image": "debian", "ports": [1], "limits": {"processes": 64}, "env": {"A": "1"}});
        let options: CreateSandbox =
            serde_json::from_value(json!({"image": "host", "ports": [2], "limits": {"cpu_millis": 500}})).unwrap();
        let all = over(file, &options, Path::new("x.json")).unwrap();
        assert_eq!(all.name.map(|name| name.to_string()).as_deref(), Some("a"));
        assert_eq!(all.image.as_str(), "host");
        assert_eq!(all.ports.get().iter().map(|port| port.get()).collect::<Vec<_>>(), [1, 2]);
        assert!(all.limits.processes.is_some() && all.limits.cpu_millis.is_some());
        assert_eq!(all.env.to_map().len(), 1);
    }

    #[test]
    fn services_are_shell_lines_with_a_way_to_be_ready() {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let all =
            services(&words(&["web=serve --port 80", "job=sleep 5"]), &words(&["web=80", "job=test -e x"])).unwrap();
        assert_eq!(all[0].argv.to_vec(), ["sh", "-c", "serve --port 80"]);
        assert_eq!(all[0].ready, Some(ReadyWhen::Port(Port::new(80).unwrap())));
        assert!(matches!(all[1].ready, Some(ReadyWhen::Command(_))));
        assert!(services(&words(&["web"]), &[]).is_err());
        assert!(services(&[], &words(&["web=80"])).is_err());
    }
}
