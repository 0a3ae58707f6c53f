//! The address of the store, and its credentials.
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

const PORT: u16 = 6379;
/// Keys expire after this time, so that a run that was killed leaves nothing forever.
const EXPIRY: Duration = Duration::from_secs(24 * 60 * 60);
/// Longer files are refused.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A store that speaks the Redis protocol. Its display has no secrets.
pub struct StoreSettings {
    /// The URL, for messages.
    pub(crate) name: String,
    /// Hosts and ports. In a cluster the first one that answers names the others.
    pub(crate) nodes: Vec<(String, u16)>,
    pub(crate) is_cluster: bool,
    pub(crate) is_tls: bool,
    pub(crate) database: i64,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    /// Certificates to trust, PEM.
    pub(crate) ca: Option<Vec<u8>>,
    pub(crate) timeout: Duration,
    pub(crate) expiry: Duration,
}

impl StoreSettings {
    /// Parses settings from a URL: `redis://HOST[:PORT][/DATABASE]`; `rediss://` with TLS;
    /// `redis-cluster://`, `rediss-cluster://`, or several hosts with commas between them for a
    /// cluster. A read is repeated for `timeout`.
    ///
    /// # Errors
    /// It is no such URL: one line that says what would be right.
    pub fn parse(url: &str, timeout: Duration) -> Result<StoreSettings, String> {
        let refusal = |why: &str| Err(format!("{url:?}: {why}"));
        let Some((scheme, rest)) = url.split_once("://") else {
            return refusal("not a URL. Write for example redis://10.0.0.5:6379.");
        };
        let (is_tls, mut is_cluster) = match scheme {
            "redis" => (false, false),
            "rediss" => (true, false),
            "redis-cluster" => (false, true),
            "rediss-cluster" => (true, true),
            _ => {
                return refusal(
                    "unknown scheme. Write redis://, rediss://, redis-cluster:// or rediss-cluster://.",
                );
            }
        };
        if rest.contains('@') {
            return Err(
                "Other users can see a password in the URL. Put it in a file and give --remote-auth FILE."
                    .to_string(),
            );
        }
        let (hosts, database) = rest.split_once('/').unwrap_or((rest, ""));
        let Ok(database) = (if database.is_empty() { Ok(0) } else { database.parse::<u16>() })
        else {
            return refusal("the part after / is not the number of a database");
        };
        let nodes = hosts.split(',').map(node).collect::<Option<Vec<_>>>();
        let Some(nodes) = nodes else {
            return refusal("a host is wrong. Write HOST, HOST:PORT or [ADDRESS]:PORT.");
        };
        is_cluster |= nodes.len() > 1;
        if is_cluster && database != 0 {
            return refusal("a cluster has only database 0. Leave the number out.");
        }
        Ok(StoreSettings {
            name: url.to_string(),
            nodes,
            is_cluster,
            is_tls,
            database: database as i64,
            user: None,
            password: None,
            ca: None,
            timeout: timeout.max(Duration::from_secs(1)),
            expiry: EXPIRY,
        })
    }

    /// Reads the password from a file, or user and password from a line each.
    ///
    /// # Errors
    /// It can't be read, others may read it, or it has no or more lines.
    pub fn set_auth(&mut self, path: &Path) -> Result<(), String> {
        let (file, text) = read(path)?;
        let meta = file.metadata().map_err(|e| named(path, e))?;
        if meta.mode() & 0o077 != 0 {
            return Err(named(
                path,
                format!(
                    "other users may read the file (mode {:o}). Run chmod 600 on it.",
                    meta.mode() & 0o777
                ),
            ));
        }
        let text =
            String::from_utf8(text).map_err(|_| named(path, "the file is not valid UTF-8"))?;
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        (self.user, self.password) = match lines[..] {
            [password] => (None, Some(password.to_string())),
            [user, password] => (Some(user.to_string()), Some(password.to_string())),
            _ => {
                return Err(named(
                    path,
                    "the file must have the password, or user and password on a line each",
                ));
            }
        };
        Ok(())
    }

    /// Returns whether a password crosses the network unencrypted.
    pub(crate) fn shows_password(&self) -> bool {
        self.password.is_some() && !self.is_tls
    }

    /// Sets the lifetime of keys, 24 hours by default, in whole seconds, at least 2. Keys are
    /// refreshed four times in that time. Data is lost if the store is unreachable, this process
    /// stopped, or the machine asleep for so long. The service warns at half of it. Give the engine
    /// the same (`remote-expiry`): it warns if the service is silent.
    pub fn set_expiry(&mut self, expiry: Duration) {
        self.expiry = Duration::from_secs(expiry.as_secs().max(2));
    }

    /// Reads the certificates to trust from a file, instead of those of the system.
    ///
    /// # Errors
    /// It can't be read or has no certificate; or the URL is one without TLS.
    pub fn set_ca(&mut self, path: &Path) -> Result<(), String> {
        if !self.is_tls {
            return Err("certificates are used only with rediss:// and rediss-cluster://. Leave the flag out, or change the URL.".to_string());
        }
        let (_, text) = read(path)?;
        if !text.windows(27).any(|w| w == b"-----BEGIN CERTIFICATE-----") {
            return Err(named(path, "the file has no certificate in PEM format"));
        }
        self.ca = Some(text);
        Ok(())
    }
}

fn named(path: &Path, why: impl Display) -> String {
    format!("{}: {why}", path.display())
}

fn read(path: &Path) -> Result<(File, Vec<u8>), String> {
    let file = File::open(path).map_err(|e| named(path, e))?;
    let mut bytes = Vec::new();
    (&file).take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(|e| named(path, e))?;
    Ok((file, bytes))
}

fn node(text: &str) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            (host, port.strip_prefix(':').or(if port.is_empty() { Some("") } else { None })?)
        }
        None => text.split_once(':').unwrap_or((text, "")),
    };
    let port = if port.is_empty() { PORT } else { port.parse().ok().filter(|port| *port != 0)? };
    let is_host = !host.is_empty() && !host.contains([' ', '/', '?', '#']);
    is_host.then(|| (host.to_string(), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn parse(url: &str) -> Result<StoreSettings, String> {
        StoreSettings::parse(url, Duration::from_secs(5))
    }

    #[test]
    fn urls_say_what_they_mean() {
        let one = parse("redis://db/3").unwrap();
        assert_eq!((&one.nodes[..], one.database), (&[("db".to_string(), 6379)][..], 3));
        assert!(!one.is_cluster && !one.is_tls);
        let many = parse("rediss://a:1,[::1]:2,c").unwrap();
        assert!(many.is_cluster && many.is_tls);
        assert_eq!(
            many.nodes,
            [("a".to_string(), 1), ("::1".to_string(), 2), ("c".to_string(), 6379)]
        );
        assert!(parse("redis-cluster://a").unwrap().is_cluster);
    }

    #[test]
    fn other_urls_are_refused_with_what_would_be_right() {
        for (url, word) in [
            ("localhost", "redis://"),
            ("http://x", "redis://"),
            ("redis://", "HOST"),
            ("redis://a:b", "HOST"),
            ("redis://a:0", "HOST"),
            ("redis://a,,b", "HOST"),
            ("redis://a/x", "database"),
            ("redis://a,b/1", "database 0"),
            ("redis://me:secret@a", "--remote-auth"),
        ] {
            let why = parse(url).err().expect(url);
            assert!(why.contains(word) && !why.contains("secret"), "{url}: {why}");
        }
    }

    #[test]
    fn secrets_come_from_files_that_nobody_else_reads() {
        let path = std::env::temp_dir().join(format!("memfold-auth-{}", std::process::id()));
        let mut settings = parse("redis://a").unwrap();
        std::fs::write(&path, "secret\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert!(settings.set_auth(&path).unwrap_err().contains("chmod 600"));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        settings.set_auth(&path).unwrap();
        assert_eq!(
            (settings.user.as_deref(), settings.password.as_deref()),
            (None, Some("secret"))
        );
        std::fs::write(&path, "me\nsecret\n").unwrap();
        settings.set_auth(&path).unwrap();
        assert_eq!(
            (settings.user.as_deref(), settings.password.as_deref()),
            (Some("me"), Some("secret"))
        );
        let mut tls = parse("rediss://a").unwrap();
        tls.set_auth(&path).unwrap();
        assert!(
            settings.shows_password()
                && !tls.shows_password()
                && !parse("redis://a").unwrap().shows_password()
        );
        std::fs::write(&path, "\n").unwrap();
        assert!(settings.set_auth(&path).is_err());
        assert!(settings.set_ca(&path).unwrap_err().contains("rediss://"));
        assert!(tls.set_ca(&path).unwrap_err().contains("no certificate"));
        std::fs::remove_file(&path).unwrap();
        assert!(tls.set_ca(&path).is_err());
    }
}
