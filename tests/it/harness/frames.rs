//! HTTP/2 by hand: what no client library would send.

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// Bytes of a connection, one frame after the other.
#[derive(Clone, Debug)]
pub(crate) struct Frames {
    pub(crate) bytes: Vec<u8>,
    next_stream: u32,
}

impl Frames {
    /// What a connection begins with.
    pub(crate) fn opening() -> Self {
        let mut frames = Self { bytes: PREFACE.to_vec(), next_stream: 1 };
        frames.frame(SETTINGS, 0, 0, &[]);
        frames
    }

    /// A call of `path` with `message`.
    pub(crate) fn call(&mut self, path: &str, message: &[u8]) {
        let stream = self.headers(path);
        let length = u32::try_from(message.len()).expect("a small message");
        let body = [&[0][..], &length.to_be_bytes(), message].concat();
        self.frame(DATA, END_STREAM, stream, &body);
    }

    /// A call of `path` that is given up at once.
    pub(crate) fn call_and_reset(&mut self, path: &str) {
        let stream = self.headers(path);
        self.frame(RESET, 0, stream, &CANCEL);
    }

    fn headers(&mut self, path: &str) -> u32 {
        let stream = self.next_stream;
        self.next_stream += 2;
        // Of the static table: POST, http; then names from it or by themselves, with values by themselves.
        let mut block = vec![0x83, 0x86];
        let mut literal = |name: &[u8], value: &str| {
            block.extend(name);
            block.push(u8::try_from(value.len()).expect("a short value"));
            block.extend(value.as_bytes());
        };
        literal(&[0x04], path);
        literal(&[0x01], "localhost");
        literal(&[0x0f, 0x10], "application/grpc");
        literal(b"\x00\x02te", "trailers");
        self.frame(HEADERS, END_HEADERS, stream, &block);
        stream
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("a small frame");
        self.bytes.extend(&length.to_be_bytes()[1..]);
        self.bytes.extend([kind, flags]);
        self.bytes.extend(stream.to_be_bytes());
        self.bytes.extend(payload);
    }
}
