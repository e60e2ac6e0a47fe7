//! Audit and reconciliation.

use super::http::Call;
use super::{Client, Result};
use crate::path;
use crate::reconcile::{Reconcile, Reconciled};

impl Client {
    /// Looks for what belongs to nobody, or is missing, and puts it right unless it is only to be told (J1).
    pub fn reconcile(&self, request: &Reconcile) -> Result<Reconciled> {
        self.http.ask(Call::post(path::RECONCILE).json(request))
    }
}
