//! The pages in `docs/errors` are what the catalogue says, one for each code and no other.

use std::collections::BTreeMap;
use std::path::PathBuf;

use viv_api::{ErrorCode, catalogue};

#[test]
fn s5_every_error_has_its_page() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
    let mut wanted: BTreeMap<String, String> =
        ErrorCode::ALL.iter().map(|&code| (format!("{code}.md"), catalogue::page(code))).collect();
    wanted.insert("README.md".to_owned(), catalogue::index());
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        for (name, page) in &wanted {
            std::fs::write(folder.join(name), page).unwrap();
        }
    }
    let mut found = BTreeMap::new();
    for file in std::fs::read_dir(&folder).expect("docs/errors: write it with UPDATE=1") {
        let file = file.unwrap();
        found.insert(file.file_name().into_string().unwrap(), std::fs::read_to_string(file.path()).unwrap());
    }
    let names = |pages: &BTreeMap<String, String>| pages.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&wanted), "write what is missing with UPDATE=1, remove what is too much by hand");
    for (name, page) in &wanted {
        assert_eq!(&found[name], page, "docs/errors/{name} differs from the catalogue: UPDATE=1 writes it again");
    }
}
