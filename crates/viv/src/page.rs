//! What is made of the command line's own description: completions, and `docs/cli.md`.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::CommandFactory;

/// Completions for a shell.
pub(crate) fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    // Into memory first: the library does not take a reader that goes away.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut crate::Cli::command(), "viv", &mut text);
    io::stdout().write_all(&text)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::PathBuf;

    use clap::Command;

    use super::*;

    /// Before what is generated.
    const HEAD: &str = "\
# The command line

Written by the tests from the program's own help: `UPDATE=1 cargo test -p viv --bin viv the_page`.

Standard output is data; all else is on standard error. With `--json` it is one JSON object a line, with the names of \
the [API](api.md). Errors are `error: …`, with `hint: …` for what helps and `see: …` for the [page](errors/README.md) \
that explains it.

## Configuration

In rising order: `/etc/viv/config.toml`, `~/.config/viv/config.toml` (`$XDG_CONFIG_HOME`), the file of `--config` or \
`VIV_CONFIG`, the environment, the command line.

```toml
[client]
url = \"http://127.0.0.1:7711\"     # where the daemon listens (VIV_URL, --url)
key_file = \"/etc/viv/key\"         # a file with the key (VIV_KEY, --key hold the key itself)
ca_file = \"/etc/viv/ca.pem\"       # whom to believe about https
project = \"search\"                # of new keys
```

Without any of it, `daemon.json` in the data folder (`VIV_DATA`, `--data`) says where the daemon listens, and `key` \
holds a key for it. That key is shown to nobody but a daemon on this machine.

## Exit codes

";

    /// What all verbs have is said once, at the top.
    const OF_ALL: [&str; 6] = ["json", "url", "key", "data", "config", "help"];

    /// One verb and those below it.
    fn describe(page: &mut String, mut command: Command, name: &str) {
        // What the environment of whoever writes the page holds is no part of it.
        command = command.mut_args(|arg| {
            let is_of_all = name != "viv" && OF_ALL.contains(&arg.get_id().as_str());
            let is_hidden = is_of_all || arg.is_hide_set();
            arg.hide_env_values(true).hide(is_hidden)
        });
        let help = command.render_long_help().to_string();
        let lines: String = help.lines().map(|line| line.trim_end().to_owned() + "\n").collect();
        let _ = write!(page, "\n## {name}\n\n```text\n{}```\n", lines.trim_end().to_owned() + "\n");
        // Its verbs are those of `viv image`, word for word.
        if name == "viv local image" {
            return;
        }
        let below: Vec<Command> = command.get_subcommands().cloned().collect();
        for sub in below.into_iter().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
            let name = format!("{name} {}", sub.get_name());
            describe(page, sub, &name);
        }
    }

    fn page() -> String {
        let mut command = crate::Cli::command().term_width(80);
        command.build();
        let mut page = format!("{HEAD}```text\n{}\n```\n", crate::fail::TABLE);
        describe(&mut page, command, "viv");
        page
    }

    #[test]
    fn the_page_of_the_command_line_is_what_the_program_says() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
        let page = page();
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == page,
            "docs/cli.md is not what the program says: UPDATE=1 cargo test -p viv --bin viv the_page"
        );
    }

    #[test]
    fn the_command_line_is_sound() {
        crate::Cli::command().debug_assert();
    }

    #[test]
    fn no_line_of_help_is_wider_than_a_terminal() {
        let wide: Vec<_> = page().lines().skip_while(|line| !line.starts_with("## viv")).map(str::to_owned).collect();
        let wide: Vec<_> = wide.into_iter().filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{wide:#?}");
    }
}
