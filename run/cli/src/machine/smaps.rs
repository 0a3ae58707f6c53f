//! The maps of a process as the kernel describes them, from /proc/PID/smaps or /proc/PID/maps.

/// One map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMap {
    /// Address of its first byte.
    pub start: u64,
    /// Address of its first byte past it.
    pub end: u64,
    /// Whether its bytes may be executed.
    pub is_executable: bool,
    /// The offset of its first byte in its file.
    pub offset: u64,
    /// The device of its file, as `MAJOR:MINOR` in hexadecimal digits.
    pub device: String,
    /// The number of its file on the device. 0 without a file.
    pub inode: u64,
    /// The file, or the kernel's name for it; empty without a name.
    pub name: String,
    pub resident_bytes: u64,
    /// The part of the resident memory that belongs to no file.
    pub anonymous_bytes: u64,
    /// The two-letter flags, with blanks between them.
    flags: String,
}

impl ProcessMap {
    /// Reads all maps of a text. Lines that are not understood are skipped.
    pub fn all(smaps: &str) -> Vec<ProcessMap> {
        let mut all: Vec<ProcessMap> = Vec::new();
        for line in smaps.lines() {
            match ProcessMap::begin(line) {
                Some(next) => all.push(next),
                None => all.iter_mut().last().into_iter().for_each(|map| map.take(line)),
            }
        }
        all
    }

    /// Reads the first line of a map: `START-END ACCESS OFFSET DEVICE INODE NAME`.
    fn begin(line: &str) -> Option<ProcessMap> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let map = ProcessMap {
            start: number(start)?,
            end: number(end)?,
            is_executable: fields.next()?.contains('x'),
            offset: number(fields.next()?)?,
            device: fields.next()?.to_string(),
            inode: fields.next()?.parse().ok()?,
            name: fields.next().unwrap_or_default().trim_start().to_string(),
            ..Default::default()
        };
        (map.start <= map.end).then_some(map)
    }

    /// Reads another line of the map.
    fn take(&mut self, line: &str) {
        if let Some(bytes) = kib(line, "Rss:") {
            self.resident_bytes = bytes;
        } else if let Some(bytes) = kib(line, "Anonymous:") {
            self.anonymous_bytes = bytes;
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            self.flags = flags.to_string();
        }
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Returns whether it maps a file.
    pub fn has_inode(&self) -> bool {
        self.inode != 0
    }

    /// Returns whether the map has a two-letter flag.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.split_ascii_whitespace().any(|one| one == flag)
    }

    /// Returns whether it is registered with a userfaultfd, as managed memory is.
    pub fn is_registered(&self) -> bool {
        ["um", "uw", "ui"].iter().any(|flag| self.has(flag))
    }

    /// Returns whether it is memfold's own: reserved without a promise of memory, and without huge
    /// pages.
    pub fn is_own(&self) -> bool {
        !self.has_inode() && self.has("nr") && self.has("nh")
    }
}

/// Returns the bytes of a line `NAME  KIB kB`.
pub fn kib(line: &str, name: &str) -> Option<u64> {
    Some(line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_with_their_names_and_flags() {
        let all = ProcessMap::all(
            "7d0000-7d1000 rw-p 00000000 00:00 0 \nRss:   4 kB\nVmFlags: rd wr um\n\
             7e0000-7e2000 r--p 00002000 fe:00 18500       /opt/my  program\nRss: 8 kB\nAnonymous: 4 kB\nVmFlags: rd\n",
        );
        let [one, two] = &all[..] else { panic!("{all:?}") };
        assert_eq!((one.bytes(), one.resident_bytes, one.name.as_str()), (4096, 4096, ""));
        assert!(one.is_registered() && !one.is_own() && !one.has_inode());
        assert_eq!((two.name.as_str(), two.device.as_str()), ("/opt/my  program", "fe:00"));
        assert_eq!((two.resident_bytes, two.anonymous_bytes), (8192, 4096));
        assert!(two.has_inode() && two.has("rd") && !two.has("r"));
    }

    #[test]
    fn line_of_maps_is_parsed() {
        let line = "7f1c2a000000-7f1c2a021000 r-xp 00002000 fe:01 1234   /usr/lib/a b.so (deleted)";
        let line = ProcessMap::begin(line).unwrap();
        assert_eq!(line.start..line.end, 0x7f1c_2a00_0000..0x7f1c_2a02_1000);
        assert_eq!((line.is_executable, line.offset, line.inode), (true, 0x2000, 1234));
        assert_eq!(line.name, "/usr/lib/a b.so (deleted)");
        let anonymous = ProcessMap::begin("1000-2000 rwxp 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.is_executable, anonymous.name.as_str()), (true, ""));
        assert!(ProcessMap::begin("1000 rwxp").is_none());
    }

    #[test]
    fn nonsense_has_no_maps() {
        for text in
            ["", "x", "1-", "g-h rw-p", "Rss: 4 kB\nVmFlags: um", "2-1 rw-p 0 0 0\nVmFlags: um"]
        {
            assert_eq!(ProcessMap::all(text), [], "{text:?}");
        }
    }
}
