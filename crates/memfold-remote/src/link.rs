//! One connection to the store: a server, or the servers of a cluster.
use crate::settings::Settings;
use redis::cluster::{ClusterClient, ClusterConnection, cluster_pipe};
use redis::{
    Client, Cmd, Connection, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, RedisResult,
};
use redis::{TlsCertificates, Value};
use std::time::Duration;

/// Times that the client follows a slot of a cluster to another server.
const REDIRECTS: u32 = 4;

/// A connection. After an error it may not be used again: answers may be under way on it.
pub enum Link {
    /// To one server.
    One(Box<Connection>),
    /// To all of a cluster.
    Many(Box<ClusterConnection>),
}

impl Link {
    /// Connects and authenticates. Each answer may take `patience`.
    pub fn open(settings: &Settings, patience: Duration) -> RedisResult<Link> {
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
            let nodes = settings.nodes.iter().map(info).collect::<RedisResult<Vec<_>>>()?;
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
            return Ok(Link::Many(Box::new(connection)));
        }
        let info = info(&settings.nodes[0])?;
        let client = match certificates {
            Some(certificates) => Client::build_with_tls(info, certificates)?,
            None => Client::open(info)?,
        };
        let connection = client.get_connection_with_timeout(patience)?;
        connection.set_read_timeout(Some(patience))?;
        connection.set_write_timeout(Some(patience))?;
        Ok(Link::One(Box::new(connection)))
    }

    /// Does all commands in one pipeline.
    pub fn all(&mut self, commands: impl IntoIterator<Item = Cmd>) -> RedisResult<Vec<Value>> {
        match self {
            Link::One(connection) => {
                let mut pipe = redis::pipe();
                commands.into_iter().for_each(|command| {
                    pipe.add_command(command);
                });
                pipe.query(connection)
            }
            Link::Many(connection) => {
                let mut pipe = cluster_pipe();
                commands.into_iter().for_each(|command| {
                    pipe.add_command(command);
                });
                pipe.query(connection)
            }
        }
    }

    /// What the servers say about themselves, all in one text.
    pub fn info(&mut self, section: &str) -> RedisResult<String> {
        let mut command = redis::cmd("INFO");
        command.arg(section);
        let value: Value = match self {
            Link::One(connection) => command.query(connection)?,
            Link::Many(connection) => command.query(connection)?,
        };
        let mut text = String::new();
        collect(&value, &mut text);
        Ok(text)
    }
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
