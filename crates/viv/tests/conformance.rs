//! The provider conformance suite on real sandboxes, with each runtime (P6).
#![allow(missing_docs, reason = "tests")]

mod support;

mod embedded {
    use crate::support::{Ground, LocalWorld};

    viv_provider::conformance_tests!(LocalWorld(Ground::new()));
}

mod runc {
    use crate::support::{Ground, LocalWorld};
    use viv_sandbox::Runtime;

    viv_provider::conformance_tests!(LocalWorld(Ground::with_runtime(Runtime::Binary("runc".into()))));
}

mod runsc {
    use crate::support::{Ground, LocalWorld};
    use viv_sandbox::Runtime;

    viv_provider::conformance_tests!(LocalWorld(Ground::with_runtime(Runtime::Binary("runsc".into()))));
}

mod btrfs {
    use crate::support::{Ground, LocalWorld};

    viv_provider::conformance_tests!(LocalWorld(Ground::on_btrfs()));
}
