//! Being connected (S2). Whom one reaches then is tested where there is somebody to reach.

use viv_core::Generation;

use super::lab::{Answer, Lab, TOKEN, assert_unsupported};
use super::subject::Subject;
use crate::capability::Capability;
use crate::instance::{InstanceSpec, SaveRequest};
use crate::{Egress, Network};

/// Where Linux shows the interfaces of a network namespace.
const INTERFACES: &str = "/sys/class/net";

const LOOPBACK: &str = "lo";

pub(super) async fn without_egress_there_is_only_loopback(lab: &Lab) {
    let spec = lab.spec();
    assert_eq!(spec.network.egress, Egress::None, "nobody asked for more");
    let subject = lab.subject_of(&spec).await;
    assert_eq!(interfaces(&subject).await, [LOOPBACK]);
}

pub(super) async fn egress_is_given_or_refused(lab: &Lab) {
    let subject = Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN);
    let created = lab.provider().create(&subject.mutation(), &subject.sandbox, &lab.owner(), &connected(lab)).await;
    if !lab.can(Capability::EgressAll) {
        assert_unsupported(created, Capability::EgressAll);
        // What was refused changed nothing.
        subject.create(&lab.spec()).await;
        return;
    }
    created.must("create with egress");
    assert_connected(&subject).await;
}

pub(super) async fn egress_is_as_the_restored_spec_says(lab: &Lab) {
    let needed = [Capability::EgressAll, Capability::SaveStopped, Capability::Restore];
    if !needed.into_iter().all(|capability| lab.can(capability)) {
        // Refusals of each are shown by the cases that are about them.
        let subject = lab.subject().await;
        assert_eq!(interfaces(&subject).await, [LOOPBACK]);
        return;
    }
    let subject = lab.subject_of(&connected(lab)).await;
    let request = SaveRequest { snapshot: lab.fresh_snapshot(), live: false, memory: false };
    lab.provider().save(&subject.mutation(), &subject.sandbox, &request).await.must("save");
    for (spec, is_connected) in [(connected(lab), true), (lab.spec(), false)] {
        let restored = Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN);
        let (mutation, owner) = (restored.mutation(), lab.owner());
        let made = lab.provider().restore(&mutation, &restored.sandbox, &owner, &spec, &request.snapshot).await;
        made.must("restore");
        if is_connected {
            assert_connected(&restored).await;
        } else {
            assert_eq!(interfaces(&restored).await, [LOOPBACK]);
        }
    }
}

fn connected(lab: &Lab) -> InstanceSpec {
    InstanceSpec { network: Network { egress: Egress::All }, ..lab.spec() }
}

async fn assert_connected(subject: &Subject<'_>) {
    let found = interfaces(subject).await;
    assert!(found.iter().any(|name| name == LOOPBACK), "there is no loopback interface: {found:?}");
    assert!(found.len() > 1, "there is no way out: {found:?}");
}

async fn interfaces(subject: &Subject<'_>) -> Vec<String> {
    let listing = subject.list(INTERFACES, 1).await.must("list the interfaces");
    assert!(listing.complete);
    listing.entries.into_iter().map(|entry| entry.path).collect()
}
