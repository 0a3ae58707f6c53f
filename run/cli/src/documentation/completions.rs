//! `memfold completions`: a script that completes this command in a shell.
use crate::failure::CommandFailure;
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Command};
use clap_complete::Shell;

/// Completes what follows `--`, as bash completes that command. clap's script knows no commands.
const BASH_COMMAND: &str = r#"
_memfold_or_command() {
    local n
    for ((n = 2; n < COMP_CWORD; n++)); do
        [[ ${COMP_WORDS[n]} == -- ]] || continue
        if declare -F _command_offset >/dev/null; then
            _command_offset $((n + 1))
        elif ((n + 1 == COMP_CWORD)); then
            COMPREPLY=($(compgen -c -- "${COMP_WORDS[COMP_CWORD]}"))
        fi
        return
    done
    _memfold "$@"
}
complete -F _memfold_or_command -o bashdefault -o default memfold"#;

/// Returns the command line of `completions`.
pub fn command() -> Command {
    Command::new("completions")
        .about("Prints a script that completes memfold's subcommands and flags in a shell")
        .arg(
            Arg::new("shell")
                .value_name("SHELL")
                .required(true)
                .value_parser(PossibleValuesParser::new(["bash", "zsh", "fish"]))
                .help("The shell"),
        )
        .after_help(
            "Examples:\n\
             \x20 memfold completions bash > ~/.local/share/bash-completion/completions/memfold\n\
             \x20 memfold completions zsh > ~/.zfunc/_memfold     (with fpath+=~/.zfunc before compinit in ~/.zshrc)\n\
             \x20 memfold completions fish > ~/.config/fish/completions/memfold.fish",
        )
}

/// Prints the script for the command line `described`.
///
/// # Errors
/// 125: stdout can't be written.
pub fn main(matches: &ArgMatches, mut described: Command) -> Result<u8, CommandFailure> {
    let shell = match matches.get_one::<String>("shell").map(String::as_str) {
        Some("zsh") => Shell::Zsh,
        Some("fish") => Shell::Fish,
        _ => Shell::Bash,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut described, "memfold", &mut script);
    let rest = if shell == Shell::Bash { BASH_COMMAND } else { "" };
    say!("{}{rest}", String::from_utf8_lossy(&script).trim_end());
    Ok(0)
}
