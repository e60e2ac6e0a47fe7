//! Raw calls: a suite that tries what libraries would not let it try needs them.
#![expect(unsafe_code, reason = "raw kernel calls and fork; each block says why it is sound")]

use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;

/// An argument of a call: a number, or something borrowed for as long as the call takes.
#[derive(Clone, Copy)]
pub(crate) struct Word<'a>(libc::c_long, PhantomData<&'a ()>);

macro_rules! numbers {
    ($($kind:ty),*) => {
        $(impl From<$kind> for Word<'_> {
            fn from(number: $kind) -> Self {
                Self(number as libc::c_long, PhantomData)
            }
        })*
    };
}

#[expect(clippy::cast_lossless, reason = "one macro for all widths")]
mod numbers {
    use super::{PhantomData, Word};
    numbers!(i32, u32, i64, u64, usize);
}

impl<'a> From<&'a CStr> for Word<'a> {
    fn from(text: &'a CStr) -> Self {
        Self(text.as_ptr().expose_provenance() as libc::c_long, PhantomData)
    }
}

impl<'a> From<&'a [u8]> for Word<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self(bytes.as_ptr().expose_provenance() as libc::c_long, PhantomData)
    }
}

impl<'a, T> From<&'a T> for Word<'a> {
    fn from(value: &'a T) -> Self {
        Self(std::ptr::from_ref(value).expose_provenance() as libc::c_long, PhantomData)
    }
}

impl<'a, T> From<&'a mut T> for Word<'a> {
    fn from(value: &'a mut T) -> Self {
        Self(std::ptr::from_mut(value).expose_provenance() as libc::c_long, PhantomData)
    }
}

/// No pointer.
pub(crate) const NULL: i64 = 0;

/// `call!(number, arguments…)`: the kernel's answer.
macro_rules! call {
    ($number:expr $(, $argument:expr)* $(,)?) => {
        $crate::sys::call_kernel($number, &[$($crate::sys::Word::from($argument)),*])
    };
}
pub(crate) use call;

/// Calls the kernel with up to six arguments.
pub(crate) fn call_kernel(number: libc::c_long, arguments: &[Word<'_>]) -> io::Result<i64> {
    let mut words = [0; 6];
    for (word, argument) in words.iter_mut().zip(arguments) {
        *word = argument.0;
    }
    // SAFETY: pointers are to what the arguments borrow. Calls that change this process's memory or flow of control
    // beyond that are made only in a process of the attempt's own (see `in_child`), which ends right after.
    let answer = unsafe { libc::syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]) };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Calls the kernel the way that 32-bit programs do, which a filter may have forgotten.
#[cfg(target_arch = "x86_64")]
pub(crate) fn call_32_bit(number: u32, first: u32) -> io::Result<i64> {
    let mut answer = i64::from(number);
    // SAFETY: one number as argument, no pointer; rbx, which the compiler keeps for itself, is put back.
    unsafe {
        std::arch::asm!(
            "xchg {first}, rbx",
            "int 0x80",
            "xchg {first}, rbx",
            first = inout(reg) u64::from(first) => _,
            inout("rax") answer,
            in("rcx") 0_u64, in("rdx") 0_u64, in("rsi") 0_u64, in("rdi") 0_u64,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    let answer = i64::from(answer as i32);
    if answer < 0 { Err(io::Error::from_raw_os_error(-answer as i32)) } else { Ok(answer) }
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Code(i32),
    Signal { number: i32, dumped_core: bool },
}

/// Runs something in a process of its own and waits for that.
pub(crate) fn in_child(work: impl FnOnce()) -> io::Result<End> {
    // SAFETY: this program has one thread, so the child may do all that the parent may.
    let pid = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => {
            work();
            exit(0)
        }
        pid => pid,
    };
    let mut status = 0;
    loop {
        // SAFETY: `status` outlives the call.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(if libc::WIFSIGNALED(status) {
        End::Signal { number: libc::WTERMSIG(status), dumped_core: libc::WCOREDUMP(status) }
    } else {
        End::Code(libc::WEXITSTATUS(status))
    })
}

/// Ends this process without a word.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: nothing here needs to be run at exit.
    unsafe { libc::_exit(code) }
}

/// Kills this process after a while, should it hang.
pub(crate) fn alarm(seconds: u32) {
    // SAFETY: a number.
    unsafe { libc::alarm(seconds) };
}
