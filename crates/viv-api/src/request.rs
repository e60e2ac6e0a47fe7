//! Reading a request's body: strictly, and with the place where it went wrong.
//!
//! What a derive makes of a struct also takes a list of its fields in order, which no schema allows and nobody means.
//! Here an object is an object. And since a body is walked value by value, an error can say where it is.

use serde::de::{self, DeserializeOwned, DeserializeSeed, EnumAccess, IntoDeserializer as _, VariantAccess, Visitor};
use serde_json::Value;

use crate::error::{ApiError, ErrorCode, ErrorDetails};

/// Longest place that an error names; keys in a request may be long.
const PLACE_CHARS_MAX: usize = 200;

/// Reads a body. An error is `invalid_request`, with the place in `details.field`.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let invalid = |message: String| ApiError::new(ErrorCode::InvalidRequest, message);
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| invalid(format!("the body is no JSON: {error}")).hint("send an object, {} if it is empty"))?;
    parse_value(&value)
}

/// Reads a body that is JSON already.
pub fn parse_value<T: DeserializeOwned>(value: &Value) -> Result<T, ApiError> {
    T::deserialize(Strict(value)).map_err(|Wrong { place, message }| {
        let place: String = place.chars().take(PLACE_CHARS_MAX).collect();
        let message = if place.is_empty() { message } else { format!("{place}: {message}") };
        let error = ApiError::new(ErrorCode::InvalidRequest, message);
        if place.is_empty() {
            return error;
        }
        error.details(ErrorDetails { field: Some(place), ..ErrorDetails::default() })
    })
}

/// What is wrong, and where: `policy.lifetime_ms`, `ports.0`.
#[derive(Debug)]
struct Wrong {
    place: String,
    message: String,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Wrong {}

impl de::Error for Wrong {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        Self { place: String::new(), message: message.to_string() }
    }

    /// What was sent is told by its kind only: it may be long, or secret (S6).
    fn invalid_type(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::custom(format_args!("{} is not {expected}", kind(found)))
    }

    fn invalid_value(_: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::custom(format_args!("must be {expected}"))
    }

    fn unknown_field(_: &str, expected: &'static [&'static str]) -> Self {
        Self::custom(format_args!("there is no such field; there are {}", expected.join(", ")))
    }

    fn unknown_variant(_: &str, expected: &'static [&'static str]) -> Self {
        Self::custom(format_args!("must be one of {}", expected.join(", ")))
    }
}

impl Wrong {
    fn within(mut self, part: &str) -> Self {
        self.place = if self.place.is_empty() { part.to_owned() } else { format!("{part}.{}", self.place) };
        self
    }
}

fn kind(found: de::Unexpected<'_>) -> &'static str {
    match found {
        de::Unexpected::Bool(_) => "a truth value",
        de::Unexpected::Unsigned(_) | de::Unexpected::Signed(_) | de::Unexpected::Float(_) => "a number",
        de::Unexpected::Str(_) | de::Unexpected::Char(_) => "a text",
        de::Unexpected::Seq => "a list",
        de::Unexpected::Map => "an object",
        de::Unexpected::Unit | de::Unexpected::Option => "null",
        de::Unexpected::Bytes(_)
        | de::Unexpected::NewtypeStruct
        | de::Unexpected::Enum
        | de::Unexpected::UnitVariant
        | de::Unexpected::NewtypeVariant
        | de::Unexpected::TupleVariant
        | de::Unexpected::StructVariant
        | de::Unexpected::Other(_) => "this",
    }
}

/// A value that is read strictly.
#[derive(Clone, Copy)]
struct Strict<'a>(&'a Value);

impl Strict<'_> {
    fn unexpected(&self) -> de::Unexpected<'_> {
        match self.0 {
            Value::Null => de::Unexpected::Unit,
            Value::Bool(value) => de::Unexpected::Bool(*value),
            Value::Number(_) => de::Unexpected::Other("number"),
            Value::String(text) => de::Unexpected::Str(text),
            Value::Array(_) => de::Unexpected::Seq,
            Value::Object(_) => de::Unexpected::Map,
        }
    }
}

impl<'de> de::Deserializer<'de> for Strict<'de> {
    type Error = Wrong;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(number), _, _) => visitor.visit_u64(number),
                (None, Some(number), _) => visitor.visit_i64(number),
                (None, None, number) => visitor.visit_f64(number.unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(values) => visitor.visit_seq(Items(values.iter().enumerate())),
            Value::Object(fields) => visitor.visit_map(Fields { fields: fields.iter(), value: None }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        self.deserialize_map(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.0 {
            Value::Object(_) => self.deserialize_any(visitor),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                Err(de::Error::invalid_type(self.unexpected(), &"an object"))
            }
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        match self.0 {
            Value::String(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            Value::Object(fields) => {
                let mut fields = fields.iter();
                match (fields.next(), fields.next()) {
                    (Some((name, value)), None) => visitor.visit_enum(Choice { name, value }),
                    (None, _) | (Some(_), Some(_)) => Err(de::Error::custom("there must be exactly one field")),
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
                Err(de::Error::invalid_type(self.unexpected(), &"one of the choices"))
            }
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct identifier ignored_any
    }
}

struct Items<'a>(std::iter::Enumerate<std::slice::Iter<'a, Value>>);

impl<'de> de::SeqAccess<'de> for Items<'de> {
    type Error = Wrong;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Wrong> {
        let Some((index, value)) = self.0.next() else { return Ok(None) };
        seed.deserialize(Strict(value)).map(Some).map_err(|wrong| wrong.within(&index.to_string()))
    }
}

struct Fields<'a> {
    fields: serde_json::map::Iter<'a>,
    /// The field whose name was given last.
    value: Option<(&'a String, &'a Value)>,
}

impl<'de> de::MapAccess<'de> for Fields<'de> {
    type Error = Wrong;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Wrong> {
        self.value = self.fields.next();
        let Some((name, _)) = self.value else { return Ok(None) };
        let name = name.as_str();
        seed.deserialize(de::value::BorrowedStrDeserializer::new(name))
            .map(Some)
            .map_err(|wrong: Wrong| wrong.within(name))
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Wrong> {
        let (name, value) = self.value.take().ok_or_else(|| de::Error::custom("a value without a name"))?;
        seed.deserialize(Strict(value)).map_err(|wrong| wrong.within(name))
    }
}

/// An object whose one field is the choice.
struct Choice<'a> {
    name: &'a str,
    value: &'a Value,
}

impl<'de> EnumAccess<'de> for Choice<'de> {
    type Error = Wrong;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), Wrong> {
        let name = de::value::BorrowedStrDeserializer::new(self.name);
        let chosen = seed.deserialize(name).map_err(|wrong: Wrong| wrong.within(self.name))?;
        Ok((chosen, self))
    }
}

impl<'de> VariantAccess<'de> for Choice<'de> {
    type Error = Wrong;

    fn unit_variant(self) -> Result<(), Wrong> {
        Err(de::Error::custom("this choice is a word, not an object"))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Wrong> {
        seed.deserialize(Strict(self.value)).map_err(|wrong| wrong.within(self.name))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Wrong> {
        de::Deserializer::deserialize_seq(Strict(self.value), visitor).map_err(|wrong| wrong.within(self.name))
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], visitor: V) -> Result<V::Value, Wrong> {
        de::Deserializer::deserialize_map(Strict(self.value), visitor).map_err(|wrong| wrong.within(self.name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::execution::StartExecution;
    use crate::limits::Limits;
    use crate::sandbox::{CreateSandbox, ExtendSandbox};

    fn refused<T: DeserializeOwned>(value: &Value) -> (String, String) {
        let Err(error) = parse::<T>(value.to_string().as_bytes()) else { panic!("{value} was taken") };
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        (error.details.and_then(|details| details.field).unwrap_or_default(), error.message)
    }

    #[test]
    fn s5_an_error_says_where() {
        let place = |value: Value| refused::<CreateSandbox>(&value).0;
        assert_eq!(place(json!({"policy": {"lifetime_ms": 1}})), "policy.lifetime_ms");
        assert_eq!(place(json!({"ports": [80, 0]})), "ports.1");
        assert_eq!(place(json!({"labels": {"team": "a", "no space": "b"}})), "labels.no space");
        assert_eq!(place(json!({"env": {"A": "\u{0}"}})), "env.A");
        assert_eq!(place(json!({"nmae": "a"})), "nmae");
        assert_eq!(place(json!({"network": {"egress": "some"}})), "network.egress");
        assert_eq!(place(json!({"limits": {"memory_bytes": 1}})), "limits.memory_bytes");
        assert_eq!(place(json!("text")), "");
        assert_eq!(refused::<ExtendSandbox>(&json!({"exactly_ms": 1})).0, "exactly_ms");
        assert_eq!(
            refused::<Limits>(&json!({"processes": "many"})).1,
            "processes: must be a whole number or the word unlimited"
        );
        assert_eq!(refused::<StartExecution>(&json!({})).1, "missing field `argv`");
        assert!(place(json!({"x".repeat(9_000): 1})).len() <= PLACE_CHARS_MAX);
    }

    #[test]
    fn s5_an_object_is_an_object() {
        refused::<Limits>(&json!([null, null]));
        refused::<Limits>(&json!([]));
        assert_eq!(
            refused::<CreateSandbox>(&json!({"policy": [null, null]})),
            ("policy".to_owned(), "policy: a list is not an object".to_owned(),)
        );
        refused::<ExtendSandbox>(&json!({}));
        refused::<ExtendSandbox>(&json!({"exactly_ms": 1_000, "at_least_ms": 1_000}));
        refused::<ExtendSandbox>(&json!("exactly_ms"));
    }

    #[test]
    fn s6_what_was_sent_is_not_told_back() {
        for value in [json!({"env": {"A": ["secret"]}}), json!({"env": "secret"}), json!({"name": "se cret"})] {
            assert!(!refused::<CreateSandbox>(&value).1.contains("cret"), "{value}");
        }
        assert!(parse::<Limits>(b"secret").unwrap_err().message.starts_with("the body is no JSON"));
    }

    #[test]
    fn a_whole_number_may_be_written_with_a_point() {
        let spec: StartExecution = parse(br#"{"argv": ["true"], "limit_ms": 5.0}"#).unwrap();
        assert_eq!(spec.to_spec(1).limit_ms, Some(5));
        refused::<StartExecution>(&json!({"argv": ["true"], "limit_ms": 5.5}));
        refused::<StartExecution>(&json!({"argv": ["true"], "limit_ms": -5.0}));
        refused::<StartExecution>(&json!({"argv": ["true"], "limit_ms": 1e300}));
    }

    #[test]
    fn every_good_request_is_read_as_by_anybody() {
        let texts = [
            r#"{"name": "a", "labels": {"x": "y"}, "limits": {"cpu_millis": "unlimited", "processes": 9}, "wait_ms": null}"#,
            r#"{"network": {"egress": "all"}, "ports": [1, 2], "policy": {"persistent": true, "idle_ms": 1000}}"#,
            "{}",
        ];
        for text in texts {
            let read: CreateSandbox = parse(text.as_bytes()).unwrap();
            assert_eq!(read, serde_json::from_str::<CreateSandbox>(text).unwrap());
        }
    }
}
