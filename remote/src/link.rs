//! One connection to the store: a server, or the servers of a cluster.
use crate::settings::StoreSettings;
use redis::cluster::{ClusterClient, ClusterConnection, cluster_pipe};
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::{
    Client, Cmd, Connection, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, RedisResult,
};
use redis::{TlsCertificates, Value};
use std::time::Duration;

/// Times that the client follows a slot of a cluster to another server.
const REDIRECTS: u32 = 4;

/// Host and port of a server.
pub type Node = (String, u16);

/// A connection. After an error it may not be used again, because answers may be pending on it.
pub enum StoreLink {
    /// To one server.
    One(Box<Connection>),
    /// To all of a cluster.
    Many(Box<ClusterConnection>),
}

impl StoreLink {
    /// Connects and authenticates. Each answer may take `patience`. Reaches a cluster by any server
    /// that the settings name, or that is in `known`.
    pub fn open(
        settings: &StoreSettings,
        known: &[Node],
        patience: Duration,
    ) -> RedisResult<StoreLink> {
        let mut redis =
            RedisConnectionInfo::default().set_db(settings.database).set_skip_set_lib_name();
        if let Some(password) = &settings.password {
            redis = redis.set_password(password);
        }
        if let Some(user) = &settings.user {
            redis = redis.set_username(user);
        }
        let info = |(host, port): &(String, u16)| {
            let (host, port) = (host.clone(), *port);
            let addr = match settings.is_tls {
                true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
                false => ConnectionAddr::Tcp(host, port),
            };
            Ok(addr.into_connection_info()?.set_redis_settings(redis.clone()))
        };
        let certificates =
            settings.ca.clone().map(|ca| TlsCertificates { client_tls: None, root_cert: Some(ca) });
        if settings.is_cluster {
            let nodes = known.iter().chain(&settings.nodes);
            let nodes = nodes.map(info).collect::<RedisResult<Vec<_>>>()?;
            let mut builder = ClusterClient::builder(nodes)
                .retries(REDIRECTS)
                .max_retry_wait(patience.as_millis() as u64 / 8)
                .connection_timeout(patience)
                .response_timeout(patience);
            if let Some(certificates) = certificates {
                builder = builder.certs(certificates);
            }
            let connection = builder.build()?.get_connection()?;
            connection.set_read_timeout(Some(patience))?;
            connection.set_write_timeout(Some(patience))?;
            return Ok(StoreLink::Many(Box::new(connection)));
        }
        let info = info(&settings.nodes[0])?;
        let client = match certificates {
            Some(certificates) => Client::build_with_tls(info, certificates)?,
            None => Client::open(info)?,
        };
        let connection = client.get_connection_with_timeout(patience)?;
        connection.set_read_timeout(Some(patience))?;
        connection.set_write_timeout(Some(patience))?;
        Ok(StoreLink::One(Box::new(connection)))
    }

    /// Sends all commands in one pipeline.
    pub fn all(&mut self, commands: impl IntoIterator<Item = Cmd>) -> RedisResult<Vec<Value>> {
        match self {
            StoreLink::One(connection) => {
                let mut pipe = redis::pipe();
                commands.into_iter().for_each(|command| {
                    pipe.add_command(command);
                });
                pipe.query(connection)
            }
            StoreLink::Many(connection) => {
                let mut pipe = cluster_pipe();
                commands.into_iter().for_each(|command| {
                    pipe.add_command(command);
                });
                pipe.query(connection)
            }
        }
    }

    /// Returns the servers of a cluster; none for a single server.
    pub fn nodes(&mut self) -> RedisResult<Vec<Node>> {
        let StoreLink::Many(connection) = self else { return Ok(Vec::new()) };
        let text: String = redis::cmd("CLUSTER").arg("NODES").query(connection)?;
        Ok(text.lines().filter_map(node_of).collect())
    }

    /// Returns whether data stored by this connection has reached a replica of each server that has
    /// one. Waits up to `patience`. A server that may not be asked counts as one without replicas.
    pub fn is_replicated(&mut self, patience: Duration) -> RedisResult<bool> {
        let mut ask = redis::cmd("INFO");
        ask.arg("replication");
        let mut wait = redis::cmd("WAIT");
        wait.arg(1).arg(patience.as_millis() as u64);
        let has_replica = |about: &Value| {
            let mut text = String::new();
            collect(about, &mut text);
            let mut lines = text.lines().filter_map(|line| line.trim().split_once(':'));
            lines.any(|(name, count)| name == "connected_slaves" && count != "0")
        };
        let about: Value = match self {
            StoreLink::One(connection) => ask.query(connection),
            StoreLink::Many(connection) => {
                let masters = MultipleNodeRoutingInfo::AllMasters;
                connection.route_command(&ask, RoutingInfo::MultiNode((masters, None)))
            }
        }
        .or_else(|e| match e.to_string().to_lowercase().contains("permission") {
            true => Ok(Value::Nil),
            false => Err(e),
        })?;
        match (self, about) {
            (StoreLink::One(connection), about) => {
                Ok(!has_replica(&about) || wait.query::<u64>(connection)? > 0)
            }
            (StoreLink::Many(connection), Value::Map(all)) => {
                for (name, _) in all.iter().filter(|(_, about)| has_replica(about)) {
                    let name: String = redis::from_redis_value_ref(name)?;
                    let Some((host, port)) = host_and_port(&name) else { continue };
                    let one = SingleNodeRoutingInfo::ByAddress { host, port };
                    let value = connection.route_command(&wait, RoutingInfo::SingleNode(one))?;
                    if value == Value::Int(0) {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            (StoreLink::Many(_), _) => Ok(true),
        }
    }

    /// Returns what the servers report about themselves, in one text.
    pub fn info(&mut self, section: &str) -> RedisResult<String> {
        let mut command = redis::cmd("INFO");
        command.arg(section);
        let value: Value = match self {
            StoreLink::One(connection) => command.query(connection)?,
            StoreLink::Many(connection) => command.query(connection)?,
        };
        let mut text = String::new();
        collect(&value, &mut text);
        Ok(text)
    }
}

fn host_and_port(text: &str) -> Option<Node> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok()?;
    (!host.is_empty()).then(|| (host.trim_matches(['[', ']']).to_string(), port))
}

/// Returns the server of a line of CLUSTER NODES: `ID HOST:PORT@PORT[,NAME] FLAGS ...`.
fn node_of(line: &str) -> Option<Node> {
    let mut words = line.split(' ').skip(1);
    let (address, flags) = (words.next()?, words.next()?);
    let is_there = !flags.split(',').any(|flag| matches!(flag, "noaddr" | "handshake"));
    host_and_port(address.split_once('@')?.0).filter(|_| is_there)
}

fn collect(value: &Value, to: &mut String) {
    match value {
        Value::BulkString(bytes) => to.push_str(&String::from_utf8_lossy(bytes)),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => to.push_str(text),
        Value::Array(all) => all.iter().for_each(|value| collect(value, to)),
        Value::Map(all) => all.iter().for_each(|(_, value)| collect(value, to)),
        _ => {}
    }
    to.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_a_cluster_are_found_in_its_table() {
        let node = |host: &str, port| Some((host.to_string(), port));
        let line = "07c3 127.0.0.1:30004@31004,name slave e7d1 0 1426238317239 4 connected";
        assert_eq!(node_of(line), node("127.0.0.1", 30004));
        assert_eq!(
            node_of("a ::1:7000@17000 myself,master - 0 0 1 connected 0-5"),
            node("::1", 7000)
        );
        assert_eq!(node_of("a :0@0 master,noaddr - 0 0 1 disconnected"), None);
        assert_eq!((node_of(""), node_of("a b c")), (None, None));
    }
}
