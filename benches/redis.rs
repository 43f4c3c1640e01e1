//! A `redis-server` of one's own.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Ends with the value.
pub(crate) struct Redis {
    process: Child,
    port: u16,
}

impl Redis {
    /// A server without persistence on a free port.
    pub(crate) fn start() -> Self {
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = free.expect("a free port").port();
        let process = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"])
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed: apt-get install redis-server");
        let redis = Self { process, port };
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        redis
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// How long a PING takes: the median of many.
    #[allow(dead_code)] // Not every bench asks.
    pub(crate) fn ping(&self) -> Duration {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream.set_nodelay(true).expect("a socket");
        let mut pings: Vec<Duration> = (0..5_000)
            .map(|_| {
                let began = Instant::now();
                stream.write_all(b"PING\r\n").expect("it reads");
                stream.read_exact(&mut [0; 7]).expect("it answers");
                began.elapsed()
            })
            .collect();
        pings.sort_unstable();
        pings[pings.len() / 2]
    }

    /// The bytes that it has in use.
    #[allow(dead_code)] // Likewise.
    pub(crate) fn memory(&self) -> u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream.write_all(b"INFO memory\r\nQUIT\r\n").expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let line = answer.lines().find_map(|line| line.strip_prefix("used_memory:"));
        line.and_then(|line| line.trim().parse().ok()).expect("it says how much memory it uses")
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // One that has ended already is what is wanted.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
