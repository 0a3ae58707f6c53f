//! Services of the user's systemd under `memfold run`: a drop-in file that puts it before the
//! service's command. The unit itself stays as it is.
use crate::failure::CommandFailure;
use crate::program::{self, own_path, user_folder};
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the drop-in.
const DROP_IN: &str = "memfold.conf";
/// Where packages put units of users (systemd.unit(5)).
const SYSTEM_FOLDERS: [&str; 3] =
    ["/etc/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user"];

/// The begin of each drop-in.
const BEGIN: &str = "# Made by memfold wrap";

/// Returns the directories of units, in the order in which systemd looks (systemd.unit(5)).
fn folders() -> Result<impl Iterator<Item = PathBuf>, CommandFailure> {
    let own = [
        user_folder("XDG_CONFIG_HOME", ".config")?.join("systemd/user"),
        user_folder("XDG_DATA_HOME", ".local/share")?.join("systemd/user"),
    ];
    Ok(own.into_iter().chain(SYSTEM_FOLDERS.map(PathBuf::from)))
}

/// A unit of the user's systemd, as it is without memfold.
pub struct UserService {
    name: String,
    file: PathBuf,
    text: String,
}

impl UserService {
    /// Finds a service by its name, with `.service` or without.
    ///
    /// # Errors
    /// 125: there is no such unit, or it can't be read.
    pub fn find(name: &str) -> Result<UserService, CommandFailure> {
        let name = full(name)?;
        let Some(file) = folders()?.map(|folder| folder.join(&name)).find(|file| file.is_file())
        else {
            return Err(CommandFailure::own(format!(
                "{name}: no such unit of this user's systemd. `systemctl --user list-unit-files` lists them."
            )));
        };
        let text = fs::read_to_string(&file).map_err(|e| {
            CommandFailure::own(format!("{}: {}", file.display(), program::plain(&e)))
        })?;
        Ok(UserService { name, file, text })
    }

    /// Writes the drop-in, in place of an earlier one. Returns its path.
    ///
    /// # Errors
    /// 125: memfold can't be put before the unit's command, or the file can't be written.
    pub fn wrap(&self, flags: &[String]) -> Result<PathBuf, CommandFailure> {
        let text = self.drop_in(&own_path()?, flags)?;
        self.check_alone()?;
        let path = drop_in_of(&self.name)?;
        check_own(&path)?;
        let write = || {
            fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
            fs::write(&path, &text)
        };
        write().map_err(|e| {
            CommandFailure::own(format!("{}: {}", path.display(), program::plain(&e)))
        })?;
        Ok(path)
    }

    /// Returns the drop-in's text.
    fn drop_in(&self, own: &str, flags: &[String]) -> Result<String, CommandFailure> {
        let refuse = |why: &str| CommandFailure::own(format!("{}: {why}", self.file.display()));
        let values = |key: &'static str| {
            self.settings().into_iter().filter(move |(name, _)| name == key).map(|(_, value)| value)
        };
        // An empty value ends those before it.
        let lines = values("ExecStart").fold(Vec::new(), |mut lines, value| {
            match value.is_empty() {
                true => lines.clear(),
                false => lines.push(value),
            }
            lines
        });
        let [line] = &lines[..] else {
            return Err(refuse("must have exactly one ExecStart= line for memfold wrap"));
        };
        // Prefixes of the command (systemd.service(5)) stay in front. With `@` its second word is
        // not an argument.
        let command = line.trim_start_matches(['-', ':', '+', '!', '@']);
        let prefixes = &line[..line.len() - command.len()];
        if prefixes.contains('@') {
            return Err(refuse(
                "memfold wrap can't keep the name that ExecStart=@ gives the program",
            ));
        }
        let words =
            [&[own, "run", "--if-possible"].map(str::to_string), flags, &["--".into()]].concat();
        let words: Vec<_> = words.iter().map(|word| quoted(word)).collect();
        let mut text = format!(
            "{BEGIN}; memfold unwrap --service {} removes it.\n[Service]\nExecStart=\nExecStart={prefixes}{} {command}\n",
            self.name,
            words.join(" ")
        );
        if values("Type").next_back().is_some_and(|kind| kind.starts_with("notify")) {
            // The program is a child of the service's main process, which is memfold.
            text += "NotifyAccess=all\n";
        }
        Ok(text)
    }

    /// Returns the settings of the section `[Service]`. A line that ends with a backslash goes on in
    /// the next one that is no comment (systemd.syntax(7)).
    fn settings(&self) -> Vec<(String, String)> {
        let mut sections = Vec::new();
        let (mut is_service, mut line) = (false, String::new());
        for part in self.text.lines().filter(|line| !line.trim_start().starts_with(['#', ';'])) {
            let part = part.trim_end();
            if let Some(begin) = part.strip_suffix('\\') {
                line += begin;
                line.push(' ');
                continue;
            }
            line += part;
            let whole = std::mem::take(&mut line);
            let whole = whole.trim();
            if whole.starts_with('[') {
                is_service = whole == "[Service]";
            } else if let Some((key, value)) = whole.split_once('=').filter(|_| is_service) {
                sections.push((key.trim().to_string(), value.trim().to_string()));
            }
        }
        sections
    }

    /// Refuses a unit whose command another drop-in sets: which of the two would count depends on
    /// their names.
    fn check_alone(&self) -> Result<(), CommandFailure> {
        for folder in folders()?.map(|folder| folder.join(format!("{}.d", self.name))) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                let text = fs::read_to_string(&path).unwrap_or_default();
                let sets = text.lines().any(|line| line.trim_start().starts_with("ExecStart"));
                if sets && !text.starts_with(BEGIN) {
                    return Err(CommandFailure::own(format!(
                        "{}: sets ExecStart too. Put memfold run before the command there.",
                        path.display()
                    )));
                }
            }
        }
        Ok(())
    }
}

/// Refuses to replace or remove a drop-in that memfold has not written.
fn check_own(path: &Path) -> Result<(), CommandFailure> {
    let is_own = fs::read_to_string(path).is_ok_and(|text| text.starts_with(BEGIN));
    if path.symlink_metadata().is_ok() && !is_own {
        return Err(CommandFailure::own(format!(
            "{}: is no file of memfold wrap, so it stays. Remove it first.",
            path.display()
        )));
    }
    Ok(())
}

/// Returns the wrapped services, each with the command that its drop-in sets.
pub fn wrapped() -> Result<Vec<(String, String)>, CommandFailure> {
    let folder = user_folder("XDG_CONFIG_HOME", ".config")?.join("systemd/user");
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path().join(DROP_IN)).unwrap_or_default();
        let name = entry.file_name().to_string_lossy().trim_end_matches(".d").to_string();
        let line = text.lines().rev().find_map(|line| line.strip_prefix("ExecStart="));
        if text.starts_with(BEGIN) {
            all.push((name, line.unwrap_or_default().to_string()));
        }
    }
    all.sort();
    Ok(all)
}

/// Removes the drop-in of a service.
///
/// # Errors
/// 125: there is none, or it can't be removed.
pub fn unwrap(name: &str) -> Result<(), CommandFailure> {
    let name = full(name)?;
    let path = drop_in_of(&name)?;
    if path.symlink_metadata().is_err() {
        return Err(CommandFailure::own(format!(
            "{name}: is not wrapped. `memfold wrap` lists what is."
        )));
    }
    check_own(&path)?;
    fs::remove_file(&path)
        .map_err(|e| CommandFailure::own(format!("{}: {}", path.display(), program::plain(&e))))?;
    // The directory may have other drop-ins.
    let _ = path.parent().map(fs::remove_dir);
    Ok(())
}

/// Says what makes systemd read the changed services.
pub fn say_reload(names: &[String]) {
    if !names.is_empty() {
        eprintln!(
            "memfold: now run: systemctl --user daemon-reload && systemctl --user restart {}",
            names.join(" ")
        );
    }
}

fn full(name: &str) -> Result<String, CommandFailure> {
    let other = ["socket", "timer", "target", "path", "mount", "slice"];
    let is_other = name.rsplit_once('.').is_some_and(|(_, kind)| other.contains(&kind));
    if name.is_empty() || name.contains('/') || is_other {
        return Err(CommandFailure::own(
            "--service: give the name of a service, such as jupyter.service",
        ));
    }
    Ok(if name.ends_with(".service") { name.to_string() } else { format!("{name}.service") })
}

fn drop_in_of(name: &str) -> Result<PathBuf, CommandFailure> {
    let folder = user_folder("XDG_CONFIG_HOME", ".config")?.join("systemd/user");
    Ok(folder.join(format!("{name}.d")).join(DROP_IN))
}

/// Quotes a word for ExecStart=, if it needs to be. `%` and `$` are doubled, as they have a meaning
/// there.
fn quoted(word: &str) -> String {
    let word = word.replace('%', "%%").replace('$', "$$");
    match word.contains([' ', '\t', '\n', '"', '\'', '\\', ';']) || word.is_empty() {
        true => {
            format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
        }
        false => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drop_in(text: &str, flags: &[&str]) -> Result<String, String> {
        let flags: Vec<_> = flags.iter().map(|flag| flag.to_string()).collect();
        UserService { name: "a.service".into(), file: "/a".into(), text: text.into() }
            .drop_in("/opt/my tools/memfold", &flags)
            .map_err(|failure| failure.text)
    }

    #[test]
    fn drop_in_puts_memfold_before_the_command() {
        let unit = "[Unit]\nExecStart=no\n[Service]\nType=notify\nExecStart=/bin/old\nExecStart=\n# ExecStart=old\n\
                    ExecStart = -/bin/a \\\n# a comment\n ; another\n  --b=%h\n";
        let text = drop_in(unit, &["--limit=50%"]).unwrap();
        assert!(text.contains("[Service]\nExecStart=\nExecStart=-\"/opt/my tools/memfold\" run --if-possible --limit=50%% -- /bin/a"), "{text}");
        assert!(text.contains("--b=%h\n") && text.ends_with("NotifyAccess=all\n"), "{text}");
    }

    #[test]
    fn unit_that_a_drop_in_cannot_wrap_is_refused() {
        for unit in ["[Service]\nType=simple\n", "[Service]\nExecStart=/a\nExecStart=/b\n"] {
            assert!(drop_in(unit, &[]).unwrap_err().contains("exactly one ExecStart="));
        }
        assert!(
            drop_in("[Service]\nExecStart=@/a b c\n", &[]).unwrap_err().contains("ExecStart=@")
        );
    }
}
