//! Ports inside. Dialling one that answers needs a server in the image, so
//! that is tested where images are known.

use super::lab::{Lab, assert_refused, assert_unsupported};
use crate::capability::Capability;
use crate::error::ProviderError;

pub(super) async fn a_closed_port_is_not_found(lab: &Lab) {
    let subject = lab.subject().await;
    let dialled = lab.provider().dial(&subject.instance(), 9).await;
    if lab.can(Capability::Ports) {
        assert_refused!(dialled, ProviderError::NotFound { .. });
    } else {
        assert_unsupported(dialled, Capability::Ports);
    }
}
