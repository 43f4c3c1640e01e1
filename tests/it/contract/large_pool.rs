//! A pool of the largest size can be written and read by a client with default settings.

use prost::Message;

use crate::harness::{TestServer, Verdict, dimension, hard, pb, pool, tokens, told};

const KEYS: usize = 10_000;
/// What gRPC clients accept unless they are told otherwise.
const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// As long as ids may be, nearly.
fn key(n: usize) -> String {
    format!("{n:05}-{}", "k".repeat(244))
}

#[tokio::test]
async fn the_usage_of_ten_thousand_keys_comes_in_pages_that_every_client_can_take() {
    let mut server = TestServer::start().await;
    let dimensions: Vec<_> =
        (1..=16).map(|hours| dimension(&format!("tokens/{}h", 30 * hours), 9e15)).collect();
    server.put_plan("c1", dimensions).await;
    let allocations: Vec<_> = (0..KEYS).map(|n| hard(&key(n), 0.01)).collect();
    server.create(pool("p", ["c1"], allocations)).await;
    for n in [0, 4_999, 9_999] {
        server.record(&key(n), "c1", tokens(n as i64 + 1)).await;
    }
    server.restart().await;

    let mut request =
        pb::GetPoolUsageRequest { pool_id: "p".to_owned(), page_size: 1_000, ..Default::default() };
    let (mut keys, mut consumed) = (Vec::new(), 0.0);
    loop {
        let page = told(server.pools().get_pool_usage(request.clone()).await);
        assert!(page.encoded_len() < MESSAGE_BYTES_MAX, "{} bytes", page.encoded_len());
        let usage = page.usage.expect("usage").checked();
        let last = usage.dimension("tokens/20d");
        assert_eq!((usage.dimensions.len(), last.consumed), (16, 15_001.0));
        consumed += last.keys.iter().map(|key| key.consumed).sum::<f64>();
        keys.extend(last.keys.iter().map(|key| key.api_key_id.clone()));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!((keys, consumed), ((0..KEYS).map(key).collect(), 15_001.0));

    let listed = server.list_pools().await;
    assert_eq!(listed[0].allocations.len(), KEYS);
    assert_eq!(server.get_pool("p").await.pool.as_ref(), Some(&listed[0]));
    assert_eq!(server.enforce(&key(9_999), "c1", None).await.verdict(), Verdict::Allow);
}
