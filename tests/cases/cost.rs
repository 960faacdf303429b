//! What an event costs in round trips, commits and bytes: a gate that no noisy clock can open.

use e2e::{
    cost::{self, Costs},
    stage::{DEFAULT, Stage},
};

#[tokio::test]
async fn an_event_costs_no_more_than_it_did() {
    let stage = Stage::start(DEFAULT).await.unwrap();
    let costs = cost::measure(&stage).await.unwrap();
    cost::compare(&costs, &cost::baseline().unwrap()).unwrap();
    stage.world.close().await.unwrap();
}

#[test]
fn a_statement_more_per_event_is_told() {
    let baseline = cost::baseline().unwrap();
    for name in baseline.keys() {
        let mut costs: Costs = baseline.clone();
        let worse = costs.get_mut(name).unwrap();
        worse.statements = worse.statements * 1.3 + 0.01;
        let told = cost::compare(&costs, &baseline).unwrap_err().to_string();
        assert!(
            told.contains(&format!("{name}: {:.4} statements", costs[name].statements)),
            "{told}"
        );
    }
}
