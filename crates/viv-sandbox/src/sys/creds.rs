//! Acting as another id for filesystem access, and back.

use std::io;

/// `SECBIT_NO_SETUID_FIXUP`: changing the filesystem id keeps the capabilities.
const NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;

/// While this lives, files are made as `id`, with the capabilities of before.
///
/// For this thread only. Used by the shim, which has one.
pub(crate) struct ActingAs {
    securebits: libc::c_ulong,
    uid: libc::uid_t,
    gid: libc::gid_t,
}

impl ActingAs {
    /// Takes `id` as filesystem user and group.
    pub(crate) fn id(id: u32) -> io::Result<Self> {
        // SAFETY: prctl with these options reads and writes no memory of ours.
        let securebits = unsafe { libc::prctl(libc::PR_GET_SECUREBITS) };
        if securebits < 0 {
            return Err(io::Error::last_os_error());
        }
        let securebits = securebits as libc::c_ulong;
        // SAFETY: as above.
        if unsafe { libc::prctl(libc::PR_SET_SECUREBITS, securebits | NO_SETUID_FIXUP) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: setfsuid and setfsgid take any number and answer the one of before.
        let (uid, gid) = unsafe { (libc::setfsuid(id) as libc::uid_t, libc::setfsgid(id) as libc::gid_t) };
        let this = Self { securebits, uid, gid };
        // They report nothing: asking again with an impossible id shows what holds now.
        // SAFETY: as above.
        let now = unsafe { (libc::setfsuid(u32::MAX) as u32, libc::setfsgid(u32::MAX) as u32) };
        if now != (id, id) {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        Ok(this)
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        // SAFETY: restores what `id` found; these calls touch no memory of ours.
        unsafe {
            libc::setfsuid(self.uid);
            libc::setfsgid(self.gid);
            libc::prctl(libc::PR_SET_SECUREBITS, self.securebits);
        }
    }
}
