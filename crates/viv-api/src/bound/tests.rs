use proptest::prelude::*;
use proptest::string::string_regex;
use regex::Regex;

use super::text::Named;
use super::*;

/// What a bounded text takes is exactly what its pattern and lengths say, so the document does not lie.
macro_rules! agrees {
    ($($test:ident: $type:ident),+ $(,)?) => {$(
        proptest! {
            #![proptest_config(ProptestConfig::with_cases(64))]

            #[test]
            fn $test(fitting in string_regex(&bare($type::PATTERN)).unwrap(), any in ".{0,8}", near in "[a-z:_/=0-9 \\-]{0,9}") {
                let pattern = Regex::new($type::PATTERN).unwrap();
                for text in [fitting, any, near] {
                    let long = text.chars().count();
                    let said = pattern.is_match(&text) && ($type::MIN..=$type::MAX).contains(&long);
                    prop_assert_eq!($type::new(text.as_str()).is_ok(), said, "{:?}", text);
                }
            }
        }
    )+};
}

/// The generator knows no anchors.
fn bare(pattern: &str) -> String {
    pattern.trim_start_matches('^').trim_end_matches('$').to_owned()
}

agrees! {
    actor: ActorName, argument: Argument, cause: CauseCode, command_env_value: CommandEnvValue, component: ComponentName, cursor: Cursor, env_name: EnvName, env_value: EnvValue,
    file_mode: FileMode, from_address: FromAddress, idempotency_key: IdempotencyKey, image: ImageName, key_id: KeyId, key_name: KeyName,
    label_key: LabelKey, label_value: LabelValue, lease: LeaseName, note: Note, path: Path, project: ProjectName,
    sandbox_name: SandboxName, sandbox_ref: SandboxRef, user: UserName,
}

#[test]
fn lengths_are_of_characters_as_in_the_schema() {
    assert!(SandboxName::new("a".repeat(63)).is_ok());
    let long = SandboxName::new("a".repeat(64)).unwrap_err();
    assert_eq!(long.to_string(), "a name must have 1 to 63 characters, and has 64");
    assert!(Note::new("ü".repeat(256)).is_ok());
    assert!(Note::new("ü".repeat(257)).is_err());
}

#[test]
fn s5_who_gives_a_name_for_an_id_is_told_what_an_id_looks_like() {
    for wrong in ["x", "before", "sbx_01h2xcejqtf2nbrexx3vqjhp41"] {
        let told = SnapshotRef::new(wrong).unwrap_err().to_string();
        assert_eq!(told, "a snapshot's id must be snp_ and then small letters and digits", "{wrong}");
    }
    let long = SnapshotRef::new(format!("snp_{}", "a".repeat(60))).unwrap_err().to_string();
    assert_eq!(long, "a snapshot's id must have 5 to 52 characters, and has 64");
    assert_eq!(
        SnapshotRef::new("").unwrap_err().to_string(),
        "a snapshot's id must have 5 to 52 characters, and has 0"
    );
    assert_eq!("x".parse::<LabelFilter>().unwrap_err().to_string(), "a label must be key=value");
}

#[test]
fn the_ends_of_a_range_are_in_it() {
    assert_eq!(Port::new(65_535).unwrap().get(), 65_535);
    assert_eq!(Port::new(0), Err(BoundError::Range { what: "a port", min: 1, max: 65_535 }));
    assert!(Port::new(65_536).is_err());
    assert_eq!(WaitMs::new(0).unwrap().get(), 0);
    assert_eq!(PageLimit::nearest(0).get(), 1);
    assert_eq!(PageLimit::nearest(5_000).get(), 1_000);
    assert!("-1".parse::<WaitMs>().is_err());
    assert!("18446744073709551616".parse::<Offset>().is_err());
    assert!(serde_json::from_str::<Offset>("9007199254740991").is_ok());
    assert!(serde_json::from_str::<Offset>("9007199254740992").is_err());
}

#[test]
fn an_id_is_told_from_a_name() {
    assert!(matches!(SandboxRef::new("sbx_01").unwrap().named(), Named::Id(_)));
    assert!(matches!(SandboxRef::new("sbx-01").unwrap().named(), Named::Name(_)));
    assert!(SandboxRef::new("exe_01").is_err());
    assert!(SandboxRef::new("../etc").is_err());
}

#[test]
fn too_many_are_refused() {
    let many = vec![Port::nearest(80); Ports::MAX + 1];
    assert!(matches!(Ports::new(many), Err(BoundError::Count { len: 17, .. })));
    assert!(Argv::new(Vec::new()).is_err());
    assert!(serde_json::from_str::<Labels>(r#"{"no space": "x"}"#).is_err());
    assert!(serde_json::from_str::<Env>(r#"{"A=B": "x"}"#).is_err());
    assert!(serde_json::from_str::<Env>("{\"A\": \"\\u0000\"}").is_err());
}

#[test]
fn a_label_filter_splits_at_the_first_sign() {
    let filter: LabelFilter = "a/b=c=d".parse().unwrap();
    assert_eq!((filter.key.as_str(), filter.value.as_str()), ("a/b", "c=d"));
    assert_eq!(filter.to_string(), "a/b=c=d");
    assert!("a".parse::<LabelFilter>().is_err());
    assert!("=c".parse::<LabelFilter>().is_err());
}

#[test]
fn modes_are_octal() {
    assert_eq!(FileMode::new("0644").unwrap().bits(), 0o644);
    assert_eq!(FileMode::from_bits(0o100_755).as_str(), "0755");
    assert!(FileMode::new("0o644").is_err());
}
