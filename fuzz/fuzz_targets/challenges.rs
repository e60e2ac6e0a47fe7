#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| viv_fuzz::challenges(data));
