//! Text of a bounded length, written without allocation.
use core::ffi::CStr;
use core::fmt::{Arguments, Display, Error, Formatter, Result, Write};

/// Up to `N - 1` bytes of text, followed by a zero byte. Longer text is truncated.
pub struct TextBuffer<const N: usize> {
    bytes: [u8; N],
    len: usize,
    is_cut: bool,
}

impl<const N: usize> TextBuffer<N> {
    /// Formats `text`, as far as it fits.
    pub fn of(text: Arguments<'_>) -> TextBuffer<N> {
        let mut all = TextBuffer { bytes: [0; N], len: 0, is_cut: false };
        let _ = all.write_fmt(text);
        all
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the bytes with a line end.
    pub fn line(&mut self) -> &[u8] {
        self.bytes[self.len] = b'\n';
        &self.bytes[..=self.len]
    }

    /// Returns it as a path or another name.
    ///
    /// # Errors
    /// It was truncated.
    pub fn as_c_str(&self) -> core::result::Result<&CStr, Error> {
        if self.is_cut {
            Err(Error)
        } else {
            CStr::from_bytes_until_nul(&self.bytes).map_err(|_| Error)
        }
    }
}

impl<const N: usize> Write for TextBuffer<N> {
    fn write_str(&mut self, part: &str) -> Result {
        let prefix = &part.as_bytes()[..part.len().min(N - 1 - self.len)];
        self.bytes[self.len..self.len + prefix.len()].copy_from_slice(prefix);
        self.len += prefix.len();
        self.is_cut |= prefix.len() < part.len();
        Ok(())
    }
}

/// Displays `T` on one line: each line end is a space.
pub struct OneLine<T>(pub T);

impl<T: Display> Display for OneLine<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        struct Joined<'a, 'b>(&'a mut Formatter<'b>);
        impl Write for Joined<'_, '_> {
            fn write_str(&mut self, part: &str) -> Result {
                let mut lines = part.split('\n');
                self.0.write_str(lines.next().unwrap_or(""))?;
                lines.try_for_each(|line| write!(self.0, " {line}"))
            }
        }
        write!(Joined(f), "{}", self.0)
    }
}

/// Returns the path of this process's open file.
pub fn path_of(number: i32) -> TextBuffer<32> {
    TextBuffer::of(format_args!("/proc/self/fd/{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_has_no_line_end() {
        let text = std::format!("{}", OneLine(format_args!("left{}right\n 1\n", "\n")));
        assert_eq!(text, "left right  1 ");
    }

    #[test]
    fn text_that_does_not_fit_is_cut_off_and_is_no_name() {
        for len in 0..12 {
            let all = "0123456789ab";
            let mut text =
                TextBuffer::<8>::of(format_args!("{}{}", &all[..len / 2], &all[len / 2..len]));
            let prefix = &all[..len.min(7)];
            assert_eq!(text.as_bytes(), prefix.as_bytes());
            assert_eq!(
                text.as_c_str().ok().and_then(|name| name.to_str().ok()),
                (len < 8).then_some(prefix)
            );
            assert_eq!(text.line(), std::format!("{prefix}\n").as_bytes());
        }
        assert_eq!(path_of(i32::MAX).as_c_str(), Ok(c"/proc/self/fd/2147483647"));
    }
}
