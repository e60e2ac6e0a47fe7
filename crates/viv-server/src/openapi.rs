//! The document: what `GET /v1/openapi.json` answers.

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, InfoBuilder, LicenseBuilder, OpenApi, OpenApiBuilder};

use crate::api::{Documented, SECURITY};
use crate::route;

const ABOUT: &str = "Sandboxes for agents: made, watched, used, and taken away without remains.\n\n\
    Times are milliseconds since 1970. Requests with fields or parameters that nobody knows are refused. \
    Every error has one shape, and a page in docs/errors.";

/// The whole API as an `OpenAPI` document.
pub fn document() -> OpenApi {
    let mut table = Documented::default();
    route::tell(&mut table);
    let key = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some("A key, as `viv key create` tells it once."))
        .build();
    let components = viv_api::openapi::schemas()
        .into_iter()
        // Of all kinds of pages, which are told where they are given.
        .filter(|(name, _)| name != "Page")
        .fold(ComponentsBuilder::new(), |components, (name, schema)| components.schema(name, schema))
        .security_scheme(SECURITY, SecurityScheme::Http(key));
    let license = LicenseBuilder::new().name("Apache-2.0").identifier(Some("Apache-2.0")).build();
    let info = InfoBuilder::new()
        .title("Vivarium")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(ABOUT))
        .license(Some(license));
    OpenApiBuilder::new().info(info).paths(table.into_paths()).components(Some(components.build())).build()
}
