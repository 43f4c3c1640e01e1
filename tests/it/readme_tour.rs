//! README.md's tour, run as printed: what the commands print is what it shows.

use std::process::Command;

use crate::{harness::TestServer, telemetry::tool};

const README: &str = include_str!("../../README.md");
const ADDRESS: &str = "127.0.0.1:50051";

/// A fenced block: its language and its text.
fn blocks(section: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = section.split("```").collect();
    let fenced = parts.iter().skip(1).step_by(2);
    fenced
        .filter_map(|block| block.split_once('\n'))
        .map(|(language, text)| (language, text.trim_end()))
        .collect()
}

/// Instants, waits and names that are drawn differ from run to run; the rest does not.
fn comparable(output: &str) -> String {
    const VARYING: [&str; 8] = [
        "createdAt",
        "updatedAt",
        "generatedAt",
        "observedAt",
        "resetsAt",
        "Deadline",
        "xpiresAt",
        "reservationId",
    ];
    let lines = output.lines().map(|line| match line.split_once("\": ") {
        Some((name, _)) if VARYING.iter().any(|varying| name.ends_with(varying)) => name.trim().to_owned(),
        Some((name, _)) if name.ends_with("retryAfter") => name.trim().to_owned(),
        _ => line.split("; try again in ").next().unwrap_or_default().trim().to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tour_prints_what_the_readme_shows() {
    prints_what_it_shows("A tour with grpcurl", 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_of_a_percent_plan_prints_what_the_readme_shows() {
    prints_what_it_shows("Percent plans, and what providers say", 3).await;
}

/// Runs the commands of a section, of which there are some.
async fn prints_what_it_shows(title: &str, commands_min: usize) {
    let Some(grpcurl) = tool("grpcurl") else { return };
    let server = TestServer::start().await;
    let address = server.address().to_string();
    let (_, tour) = README.split_once(&format!("\n## {title}\n")).expect("there is such a section");
    let (tour, _) = tour.split_once("\n## ").expect("something follows it");
    let mut commands: Vec<(&str, &str)> = Vec::new();
    for (language, text) in blocks(tour) {
        match language {
            "sh" => commands.push((text, "")),
            _ => commands.last_mut().expect("output follows a command").1 = text,
        }
    }
    assert!(commands.len() >= commands_min, "{} commands", commands.len());

    // One shell for all: later commands use what earlier ones have set.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script: String = commands
        .iter()
        .map(|(command, _)| format!("{}\necho '<<<end>>>'\n", command.replace(ADDRESS, &address)))
        .collect();
    let path = format!(
        "{}:{}",
        grpcurl.parent().expect("a folder").display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let run = tokio::task::spawn_blocking(move || {
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("exec 2>&1\n{script}")]).env("PATH", path);
        shell.current_dir(folder.path()).output()
    });
    let output = run.await.expect("it does not panic").expect("bash runs");
    let output = String::from_utf8(output.stdout).expect("text");
    let printed: Vec<&str> = output.split("<<<end>>>\n").collect();
    for ((command, shown), printed) in commands.iter().zip(printed) {
        assert_eq!(comparable(printed.trim_end()), comparable(shown), "printed, and shown for\n{command}");
    }
}
