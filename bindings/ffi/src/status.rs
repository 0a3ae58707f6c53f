//! The status of a call, and the sentence of a failure.
use memfold::Error;
use std::cell::RefCell;
use std::ffi::{CString, c_char};

/// Status of a call. `memfold_last_error` has the sentence.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// An argument or a setting is wrong; or the memory was unmapped or destroyed before.
    Invalid = 1,
    /// No memory or address space is left.
    NoMemory = 2,
    /// The system does not let this user have a userfaultfd.
    NoPermission = 3,
    /// This is a child of fork; mapped memory stays with its parent.
    Forked = 4,
    /// The system refused something else.
    System = 5,
}

/// A status with its sentence.
pub struct Failure {
    status: Status,
    text: String,
}

impl Failure {
    pub fn invalid(text: impl Into<String>) -> Failure {
        Failure { status: Status::Invalid, text: text.into() }
    }

    /// Adds what else may be done.
    pub fn or(mut self, advice: &str) -> Failure {
        self.text += advice;
        self
    }

    pub fn null() -> Failure {
        Failure::invalid("an argument is a null pointer")
    }
}

const ECHILD: i32 = 10;
const ENOMEM: i32 = 12;
const EINVAL: i32 = 22;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        // Settings are written without the dashes of the command's flags.
        let text = error.to_string().replace(" --", " ");
        let text = text.strip_prefix("--").unwrap_or(&text).to_string();
        let status = match error {
            Error::Config(_) => Status::Invalid,
            Error::Userfaultfd(memfold::OpenError::Forbidden) => Status::NoPermission,
            Error::Userfaultfd(_) => Status::System,
            Error::System(_, errno) => match errno.raw_os_error() {
                ECHILD => Status::Forked,
                ENOMEM => Status::NoMemory,
                EINVAL => Status::Invalid,
                _ => Status::System,
            },
            Error::Inherited => Status::Forked,
        };
        Failure { status, text }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Converts a result to a status, and keeps its sentence for the calling thread.
pub fn answer(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    let (status, text) = match call() {
        Ok(()) => (Status::Ok, String::new()),
        Err(failure) => (failure.status, failure.text),
    };
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // A thread that is ending can't keep it any more.
    let _ = LAST.try_with(|last| last.replace(text));
    status
}

/// Returns the calling thread's last sentence.
pub fn last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
