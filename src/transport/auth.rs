//! Who calls, and what they may do: tokens and certificates, as a file names them.
//!
//! The file never has a token, only its SHA-256. Nothing here says what stands in a line: a mistake in it may be a
//! token that was pasted into the wrong place.

use std::{fmt, fmt::Write as _, path::Path, str::FromStr, sync::Arc};

use arc_swap::ArcSwap;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use hashbrown::HashMap;
use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::files;

/// What a token begins with, so that people and scanners of code recognise one.
const TOKEN_PREFIX: &str = "qs_";
/// Bits that nobody can guess.
const TOKEN_BYTES: usize = 32;
/// Most lines of tokens and of certificates: each call is compared with all tokens.
const ENTRIES_MAX: usize = 1_000;
/// Longest name of a caller, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// Longest name in a certificate, in bytes.
const SAN_BYTES_MAX: usize = 256;
/// Most mistakes that are told of one file.
const FAULTS_MAX: usize = 20;

/// What a caller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Asks for decisions and tells what requests cost.
    Router,
    /// Reads everything that can be administered.
    Viewer,
    /// Does everything.
    Admin,
}

impl Role {
    /// As the file and error messages write it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Role::Router => "router",
            Role::Viewer => "viewer",
            Role::Admin => "admin",
        }
    }

    /// Whether who has this role may do what `needed` may do.
    pub(crate) fn includes(self, needed: Role) -> bool {
        self == Role::Admin || self == needed
    }
}

impl FromStr for Role {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let roles = [Role::Router, Role::Viewer, Role::Admin];
        roles.into_iter().find(|role| role.name() == text).ok_or("router, viewer or admin")
    }
}

/// Who makes a call, as audit lines name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) name: Arc<str>,
    pub(crate) role: Role,
}

impl Caller {
    /// Somebody whose certificate is all that is known.
    fn of_certificate(names: &[String]) -> Self {
        let name = names.first().map_or("certificate without a name", String::as_str);
        Self { name: name.into(), role: Role::Admin }
    }
}

/// A name of a caller that can be written into a line of the file: 1 to 64 printable characters without spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallerName(String);

impl FromStr for CallerName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
        if (1..=NAME_BYTES_MAX).contains(&text.len()) && printable && !text.starts_with('#') {
            return Ok(Self(text.to_owned()));
        }
        Err("1 to 64 printable ASCII characters without spaces, the first of them not #")
    }
}

/// The SHA-256 of a token, in a form that is compared quickly.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct TokenDigest([u64; 4]);

impl TokenDigest {
    fn of(token: &[u8]) -> Self {
        Self::from_bytes(&Sha256::digest(token).into())
    }

    fn from_bytes(bytes: &[u8; 32]) -> Self {
        let (words, _) = bytes.as_chunks();
        let mut digest = [0; 4];
        digest.iter_mut().zip(words).for_each(|(to, word)| *to = u64::from_be_bytes(*word));
        Self(digest)
    }

    fn parse(hex: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if hex.len() != 2 * bytes.len() || !hex.is_ascii() {
            return None;
        }
        for (index, byte) in bytes.iter_mut().enumerate() {
            // `from_str_radix` would take a sign.
            let digits = &hex[2 * index..2 * index + 2];
            let digits = digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then_some(digits)?;
            *byte = u8::from_str_radix(digits, 16).ok()?;
        }
        Some(Self::from_bytes(&bytes))
    }
}

/// Everybody who may call, at one moment.
#[derive(Default)]
pub(crate) struct Callers {
    tokens: Vec<(TokenDigest, Caller)>,
    /// By a DNS name or URI of their certificates.
    certificates: HashMap<String, Caller>,
}

impl fmt::Debug for Callers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, certificates) = (self.tokens.len(), self.certificates.len());
        f.debug_struct("Callers").field("tokens", &tokens).field("certificates", &certificates).finish()
    }
}

impl Callers {
    /// Reads the file at `path`; otherwise every mistake in it, naming lines and never what stands in them.
    pub(crate) fn read(path: &Path) -> Result<Callers, Vec<String>> {
        Self::parse(&files::read(path).map_err(|fault| vec![fault])?)
    }

    /// As [`read`](Self::read), of what the file holds.
    pub(crate) fn parse(content: &[u8]) -> Result<Callers, Vec<String>> {
        let Ok(text) = std::str::from_utf8(content) else { return Err(vec!["it is no text".to_owned()]) };
        let mut reader = Reader::default();
        for (number, line) in (1..).zip(text.lines()) {
            if let Err(fault) = reader.line(number, line) {
                reader.faults.push(format!("line {number}: {fault}"));
            }
        }
        reader.end()
    }

    /// There is a line of a certificate.
    pub(crate) fn name_certificates(&self) -> bool {
        !self.certificates.is_empty()
    }

    /// Whose token it is.
    fn of_token(&self, token: &[u8]) -> Option<&Caller> {
        let digest = TokenDigest::of(token);
        // All are compared, so that the time tells neither which one it is nor how much of it is right.
        let mut found = u32::MAX;
        for (index, (other, _)) in (0..).zip(&self.tokens) {
            found.conditional_assign(&index, digest.0.ct_eq(&other.0));
        }
        self.tokens.get(found as usize).map(|(_, caller)| caller)
    }

    fn of_certificate(&self, names: &[String]) -> Option<&Caller> {
        names.iter().find_map(|name| self.certificates.get(name))
    }
}

/// What was read of a file until now.
#[derive(Default)]
struct Reader {
    callers: Callers,
    /// By name: on which line it came first, and with which role.
    named: HashMap<String, (usize, Role)>,
    /// On which line a token or certificate came first.
    tokens: HashMap<TokenDigest, usize>,
    certificates: HashMap<String, usize>,
    faults: Vec<String>,
}

impl Reader {
    fn line(&mut self, number: usize, line: &str) -> Result<(), String> {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [name, role, secret] = words[..] else {
            return Err(format!("it has {} words: use NAME ROLE and a SHA-256 or san:NAME", words.len()));
        };
        let CallerName(name) =
            name.parse().map_err(|accepted| format!("the name is not valid: use {accepted}"))?;
        let role: Role = role.parse().map_err(|accepted| format!("the role is not known: use {accepted}"))?;
        let (first, known) = *self.named.entry(name.clone()).or_insert((number, role));
        if known != role {
            return Err(format!("the name has another role on line {first}"));
        }
        let caller = Caller { name: name.into(), role };
        match secret.strip_prefix("san:") {
            Some(san) => self.certificate(number, san, caller),
            None => self.token(number, secret, caller),
        }
    }

    fn token(&mut self, number: usize, hex: &str, caller: Caller) -> Result<(), String> {
        if hex.starts_with(TOKEN_PREFIX) {
            return Err(
                "it has a token itself: use its SHA-256, as `quota-share token new` prints it".to_owned()
            );
        }
        let digest = TokenDigest::parse(hex)
            .ok_or("the third word is neither a SHA-256 of 64 hexadecimal digits nor san: and a name")?;
        let first = *self.tokens.entry(digest).or_insert(number);
        if first != number {
            return Err(format!("it has the token of line {first}"));
        }
        self.callers.tokens.push((digest, caller));
        Ok(())
    }

    fn certificate(&mut self, number: usize, san: &str, caller: Caller) -> Result<(), String> {
        let printable = san.bytes().all(|byte| byte.is_ascii_graphic());
        if !(1..=SAN_BYTES_MAX).contains(&san.len()) || !printable {
            return Err("what follows san: is no DNS name or URI of 1 to 256 printable characters".to_owned());
        }
        let first = *self.certificates.entry(san.to_owned()).or_insert(number);
        if first != number {
            return Err(format!("it has the certificate's name of line {first}"));
        }
        self.callers.certificates.insert(san.to_owned(), caller);
        Ok(())
    }

    fn end(mut self) -> Result<Callers, Vec<String>> {
        let entries = self.callers.tokens.len() + self.callers.certificates.len();
        if entries == 0 && self.faults.is_empty() {
            self.faults.push("it names nobody: use lines of NAME ROLE and a SHA-256 or san:NAME".to_owned());
        }
        if entries > ENTRIES_MAX {
            self.faults.push(format!("it has {entries} entries: use at most {ENTRIES_MAX}"));
        }
        if self.faults.is_empty() {
            return Ok(self.callers);
        }
        if self.faults.len() > FAULTS_MAX {
            let more = self.faults.len() - FAULTS_MAX;
            self.faults.truncate(FAULTS_MAX);
            self.faults.push(format!("and {more} more faults"));
        }
        Err(self.faults)
    }
}

/// What a method needs of whoever calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing.
    Open,
    /// To be somebody.
    AnyRole,
    /// This role, or one that includes it.
    Needs(Role),
}

/// The names in the certificate that a connection was opened with; `None`: with none.
pub(crate) type CertificateNames = Option<Arc<[String]>>;

/// Why a call is refused before anything else is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It came without a token, and over a connection without a certificate.
    Anonymous,
    /// Its `authorization` is not of the form `Bearer TOKEN`.
    Malformed,
    /// The file has no such token.
    UnknownToken,
    /// The file has no line for any name of the certificate.
    UnknownCertificate,
    /// The role of this caller is not enough.
    Role(Caller),
}

/// Who is let in.
#[derive(Debug)]
pub(crate) enum Authentication {
    /// Everybody.
    Off,
    /// Whoever has a certificate, which was verified when the connection was opened; they may do everything.
    Certificates,
    /// Who is named in the file, as it was last read.
    Callers(ArcSwap<Callers>),
}

impl Authentication {
    /// Who makes a call with this `authorization` over a connection of `certificate`; `None`: that does not matter.
    pub(crate) fn admit(
        &self,
        access: Access,
        authorization: Option<&[u8]>,
        certificate: &CertificateNames,
    ) -> Result<Option<Caller>, Refused> {
        let callers = match (access, self) {
            (Access::Open, _) | (_, Authentication::Off) => return Ok(None),
            (_, Authentication::Certificates) => {
                let names = certificate.as_deref().ok_or(Refused::Anonymous)?;
                // Of decisions nobody asks who made them.
                return Ok((access != Access::Needs(Role::Router)).then(|| Caller::of_certificate(names)));
            }
            (_, Authentication::Callers(callers)) => callers.load(),
        };
        let caller = identify(&callers, authorization, certificate)?;
        match access {
            Access::Needs(needed) if !caller.role.includes(needed) => Err(Refused::Role(caller.clone())),
            // As above; and threads would wait for each other to count references.
            Access::Needs(Role::Router) => Ok(None),
            _ => Ok(Some(caller.clone())),
        }
    }
}

/// A token says more than the certificate of a connection, which many may share.
fn identify<'a>(
    callers: &'a Callers,
    authorization: Option<&[u8]>,
    certificate: &CertificateNames,
) -> Result<&'a Caller, Refused> {
    match (authorization, certificate) {
        (Some(authorization), _) => {
            let token = bearer(authorization).ok_or(Refused::Malformed)?;
            callers.of_token(token).ok_or(Refused::UnknownToken)
        }
        (None, Some(names)) => callers.of_certificate(names).ok_or(Refused::UnknownCertificate),
        (None, None) => Err(Refused::Anonymous),
    }
}

fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, token) = authorization.split_at_checked(SCHEME.len())?;
    (scheme.eq_ignore_ascii_case(SCHEME) && !token.is_empty()).then(|| token.trim_ascii())
}

/// A token that nobody has yet, and the line that lets its owner in.
#[derive(Debug)]
pub(crate) struct NewToken {
    /// Shown once: only its SHA-256 is kept.
    pub(crate) token: String,
    pub(crate) line: String,
}

impl NewToken {
    /// Makes a token of `random`.
    pub(crate) fn of(random: [u8; TOKEN_BYTES], CallerName(name): &CallerName, role: Role) -> Self {
        let token = format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(random));
        let mut line = format!("{name} {} ", role.name());
        for byte in Sha256::digest(&token) {
            // Writing to a string does not fail.
            let _ = write!(line, "{byte:02x}");
        }
        Self { token, line }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

    fn faults(text: &str) -> Vec<String> {
        Callers::parse(text.as_bytes()).expect_err("a file that is refused")
    }

    #[test]
    fn a_line_of_a_new_token_lets_its_owner_in_and_nobody_else() {
        let name = "router-1".parse().unwrap();
        let tokens = [1, 2].map(|random| NewToken::of([random; 32], &name, Role::Router));
        let text = format!("# routers\n\n  {}  \r\nops admin san:ops.example\n", tokens[0].line);
        let callers = Callers::parse(text.as_bytes()).unwrap();
        let caller = callers.of_token(tokens[0].token.as_bytes()).unwrap();
        assert_eq!((&*caller.name, caller.role), ("router-1", Role::Router));
        assert!(callers.of_token(tokens[1].token.as_bytes()).is_none());
        assert!(callers.of_token(b"").is_none());
        assert!(tokens[0].token.starts_with("qs_") && tokens[0].token.len() == 46);
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert!(callers.of_certificate(&names(&["other.example", "ops.example"])).is_some());
        assert!(callers.of_certificate(&names(&["other.example"])).is_none());
    }

    #[test]
    fn each_token_of_many_is_found() {
        let tokens: Vec<_> = (0..100u8)
            .map(|index| NewToken::of([index; 32], &format!("caller-{index}").parse().unwrap(), Role::Viewer))
            .collect();
        let text: String = tokens.iter().map(|token| format!("{}\n", token.line)).collect();
        let callers = Callers::parse(text.as_bytes()).unwrap();
        for (index, token) in tokens.iter().enumerate() {
            let caller = callers.of_token(token.token.as_bytes()).unwrap();
            assert_eq!(&*caller.name, format!("caller-{index}"));
        }
    }

    #[test]
    fn every_mistake_in_a_file_is_named_by_its_line_and_none_shows_what_stands_there() {
        let text = format!(
            "hidden\nhidden rooter {HASH}\nhidden router hidden\nhidden router qs_hidden\n\
             ops admin {HASH}\nops viewer san:ops.example\nother admin {HASH}\n\
             a router san:x\nb router san:x\nc router san:\nhid\u{e9}den router {HASH}\n"
        );
        assert_eq!(
            faults(&text),
            [
                "line 1: it has 1 words: use NAME ROLE and a SHA-256 or san:NAME",
                "line 2: the role is not known: use router, viewer or admin",
                "line 3: the third word is neither a SHA-256 of 64 hexadecimal digits nor san: and a name",
                "line 4: it has a token itself: use its SHA-256, as `quota-share token new` prints it",
                "line 6: the name has another role on line 5",
                "line 7: it has the token of line 5",
                "line 9: it has the certificate's name of line 8",
                "line 10: what follows san: is no DNS name or URI of 1 to 256 printable characters",
                "line 11: the name is not valid: use 1 to 64 printable ASCII characters without spaces, the first of \
                 them not #",
            ]
        );
    }

    #[test]
    fn a_file_that_lets_nobody_in_or_is_none_is_refused() {
        for (text, words) in [("", "names nobody"), ("# nothing\n\n", "names nobody")] {
            assert!(faults(text)[0].contains(words), "{text:?}");
        }
        assert!(Callers::parse(&[0xff, 0xfe]).unwrap_err()[0].contains("no text"));
        let many: String = (0..1_001).map(|index| format!("c{index} router san:c{index}\n")).collect();
        assert_eq!(faults(&many), ["it has 1001 entries: use at most 1000"]);
        let wrong = "x\n".repeat(50);
        assert_eq!(faults(&wrong).len(), FAULTS_MAX + 1);
    }

    #[test]
    fn authorization_is_read_as_http_defines_it() {
        let cases: [(&[u8], Option<&[u8]>); 6] = [
            (b"Bearer qs_x", Some(b"qs_x")),
            (b"bearer  qs_x ", Some(b"qs_x")),
            (b"Bearer ", None),
            (b"Bearer", None),
            (b"Basic dXNlcg==", None),
            (b"qs_x", None),
        ];
        for (given, token) in cases {
            assert_eq!(bearer(given), token, "{}", given.escape_ascii());
        }
    }

    #[test]
    fn an_admin_may_do_everything_and_others_their_own() {
        for role in [Role::Router, Role::Viewer, Role::Admin] {
            assert!(Role::Admin.includes(role) && role.includes(role));
            assert_eq!(role.includes(Role::Admin), role == Role::Admin);
        }
        assert!(!Role::Router.includes(Role::Viewer) && !Role::Viewer.includes(Role::Router));
    }
}
