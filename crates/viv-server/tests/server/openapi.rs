//! The document that is committed is the one that is served.

use std::path::Path;

#[test]
fn the_document_is_committed_as_it_is() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    let mut now = serde_json::to_string_pretty(&viv_server::document()).unwrap();
    now.push('\n');
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&file, &now).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        committed == now,
        "the API changed: UPDATE=1 cargo test -p viv-server --test server openapi writes it again"
    );
}

#[test]
fn every_path_of_the_api_is_in_it() {
    let document = serde_json::to_value(viv_server::document()).unwrap();
    let source = include_str!("../../../viv-api/src/path.rs");
    let paths: Vec<&str> =
        source.lines().filter_map(|line| line.strip_prefix("pub const ")?.split('"').nth(1)).collect();
    assert!(paths.len() > 30);
    for path in &paths {
        assert!(document["paths"].get(path).is_some(), "{path}");
    }
    assert_eq!(document["paths"].as_object().unwrap().len(), paths.len());
}

#[test]
fn every_operation_says_how_it_goes_wrong_in_one_shape() {
    let document = serde_json::to_value(viv_server::document()).unwrap();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.contains_key("500") && responses.contains_key("400"), "{method} {path}");
            for (status, response) in responses.iter().filter(|(status, _)| status.as_str() >= "400") {
                let schema = &response["content"]["application/json"]["schema"]["$ref"];
                let ready = path == "/ready" && status == "503";
                assert!(ready || schema == "#/components/schemas/ErrorBody", "{method} {path} {status}");
            }
        }
    }
}
