//! The sockets of a sandbox's network that say something about saving it, as the kernel lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// States of TCP, as the kernel numbers them.
const ESTABLISHED: &str = "01";
const LISTENING: &str = "0A";

/// What an address of version 4 begins with where it is told as one of version 6.
const MAPPED: &str = "0000000000000000FFFF0000";

/// Both ends of a connection, as the kernel writes them.
type Ends = (String, String);

#[derive(Debug, Default)]
pub(super) struct Sockets {
    unread: BTreeSet<u64>,
    unaccepted: BTreeSet<u64>,
    connected: BTreeMap<u64, Ends>,
    /// The ends of those that are the agent's, who speaks for those outside.
    of_agent: BTreeSet<Ends>,
}

impl Sockets {
    /// Those of the network that this process is in, which is the agent's.
    pub(super) fn look(agent: &Path) -> Self {
        let read = |name: &str| fs::read_to_string(agent.join("net").join(name)).unwrap_or_default();
        let open = fs::read_dir(agent.join("fd")).into_iter().flatten().flatten();
        let open = open.filter_map(|entry| inode_of(&fs::read_link(entry.path()).ok()?.to_string_lossy()));
        Self::parse(&[read("tcp"), read("tcp6")], &read("netlink"), &open.collect())
    }

    fn parse(tcp: &[String], netlink: &str, of_agent: &BTreeSet<u64>) -> Self {
        let mut sockets = Self::default();
        for line in tcp.iter().flat_map(|text| text.lines().skip(1)) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let [_, local, remote, state, queues, _, _, _, _, inode, ..] = fields.as_slice() else { continue };
            let Ok(inode) = inode.parse::<u64>() else { continue };
            let waiting = queues.split_once(':').and_then(|(_, queue)| u64::from_str_radix(queue, 16).ok());
            match *state {
                LISTENING if waiting > Some(0) => drop(sockets.unaccepted.insert(inode)),
                ESTABLISHED if inode != 0 => {
                    let ends = (plain(local), plain(remote));
                    if of_agent.contains(&inode) {
                        sockets.of_agent.insert(ends.clone());
                    }
                    sockets.connected.insert(inode, ends);
                }
                _ => {}
            }
        }
        for line in netlink.lines().skip(1) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let [_, _, _, _, held, _, _, _, _, inode, ..] = fields.as_slice() else { continue };
            if let (Ok(1..), Ok(inode)) = (held.parse::<u64>(), inode.parse()) {
                sockets.unread.insert(inode);
            }
        }
        sockets
    }

    /// Whether a netlink socket holds what nobody has read.
    pub(super) fn is_unread(&self, inode: u64) -> bool {
        self.unread.contains(&inode)
    }

    /// Whether somebody connected, and whoever listens has not taken notice.
    pub(super) fn is_unaccepted(&self, inode: u64) -> bool {
        self.unaccepted.contains(&inode)
    }

    /// The port that somebody outside is connected to by this one.
    pub(super) fn port_of_outside(&self, inode: u64) -> Option<u16> {
        let (local, remote) = self.connected.get(&inode)?;
        let (_, port) = local.split_once(':')?;
        let from_outside = self.of_agent.contains(&(remote.clone(), local.clone()));
        u16::from_str_radix(port, 16).ok().filter(|_| from_outside)
    }
}

/// The number of a socket, by the name that an open one has.
pub(super) fn inode_of(name: &str) -> Option<u64> {
    name.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

fn plain(address: &str) -> String {
    address.strip_prefix(MAPPED).unwrap_or(address).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_lists_is_read() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let row = |local: &str, remote: &str, state: &str, waiting: u32, inode: u64| {
            format!(
                "   0: {local} {remote} {state} 00000000:{waiting:08X} 00:00000000 00000000  1000  0 {inode} 1 0 100 0\n"
            )
        };
        let tcp = head.to_owned()
            + &row("0100007F:1F90", "00000000:0000", LISTENING, 0, 10)
            + &row("0100007F:1F91", "00000000:0000", LISTENING, 2, 11)
            // Of the agent, and of a client inside.
            + &row("0100007F:C001", "0100007F:1F90", ESTABLISHED, 0, 20)
            + &row("0100007F:C002", "0100007F:1F90", ESTABLISHED, 0, 21)
            + &row("0100007F:1F90", "0100007F:C002", ESTABLISHED, 0, 31);
        let mapped = |address: &str| format!("{MAPPED}{address}");
        let tcp6 = head.to_owned() + &row(&mapped("0100007F:1F90"), &mapped("0100007F:C001"), ESTABLISHED, 0, 30);
        let netlink = "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode\n\
            00 0 1 00000000 0 0 0 2 0 40\n00 0 2 00000000 2304 0 0 2 0 41\n";
        let sockets = Sockets::parse(&[tcp, tcp6], netlink, &[20].into());
        assert_eq!((sockets.is_unaccepted(10), sockets.is_unaccepted(11)), (false, true));
        assert_eq!((sockets.is_unread(40), sockets.is_unread(41)), (false, true));
        let ports = [30, 31, 20, 21].map(|inode| sockets.port_of_outside(inode));
        assert_eq!(ports, [Some(8080), None, None, None]);
        assert_eq!((inode_of("socket:[77]"), inode_of("pipe:[77]")), (Some(77), None));
    }
}
