//! Requests to a running server, and their answers, in JSON. `memfold blk stat`, `set` and the
//! other subcommands send them.
//!
//! The field `do` names the request: `stat`, `block_state`, `set`, `idle`, `recompress`,
//! `writeback`, `compact` or `flush`. A request that fails is answered with `{"error": "why"}`.

mod figures;

use crate::device::{DeviceMemory, ObjectPick};
use crate::export::Export;
use memfold_store::CodecSpec;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Objects in one answer to `block_state`.
const OBJECTS_MAX: usize = 1 << 14;

/// The devices that requests are about.
pub struct DeviceControl {
    backing: Arc<DeviceMemory>,
    exports: Vec<Arc<Export>>,
    /// Codec of a `recompress` request that names none.
    codec: CodecSpec,
    start: Instant,
}

impl DeviceControl {
    /// Makes a control for these exports, which share one backing. `codec` is used by recompression
    /// requests that name none.
    pub fn new(
        backing: &Arc<DeviceMemory>,
        exports: &[Arc<Export>],
        codec: CodecSpec,
    ) -> DeviceControl {
        DeviceControl {
            backing: backing.clone(),
            exports: exports.to_vec(),
            codec,
            start: Instant::now(),
        }
    }

    /// Returns the answer to a request.
    pub fn answer(&self, request: &str) -> Value {
        let Ok(request) = serde_json::from_str::<Value>(request) else {
            return json!({"error": "The request is not JSON."});
        };
        let outcome = match request["do"].as_str() {
            Some("stat") => Ok(self.stat()),
            Some("block_state") => self.block_state(&request),
            Some("set") => self.set(&request),
            Some("idle") => self.idle(&request),
            Some("recompress") => self.recompress(&request),
            Some("writeback") => self.write_back(&request),
            Some("compact") => Ok(json!({"compacted_bytes": self.backing.compact()})),
            Some("flush") => self.flush(),
            _ => Err("This server is another version of memfold, which does not know the request."
                .to_string()),
        };
        outcome.unwrap_or_else(|why| json!({ "error": why }))
    }

    fn stat(&self) -> Value {
        let mut all = figures::of_backing(&self.backing, &self.exports);
        all["version"] = env!("CARGO_PKG_VERSION").into();
        all["pid"] = std::process::id().into();
        all["codec"] = self.backing.store.codec().to_string().into();
        all["seconds"] = self.start.elapsed().as_secs_f64().into();
        all["exports"] = self.exports.iter().map(|export| figures::of_export(export)).collect();
        all
    }

    fn block_state(&self, request: &Value) -> Result<Value, String> {
        let export = self.export(request)?;
        let from = request["from"].as_u64().unwrap_or(0);
        let mut objects = Vec::new();
        let mut next = None;
        self.backing.each_object(export.device(), from, |object| {
            // A block has up to 513 objects, and an answer begins with a block.
            let block = export.device().block_bytes() as u64;
            let begins = object.offset.is_multiple_of(block) && object.offset > from;
            if objects.len() >= OBJECTS_MAX && begins {
                next = Some(object.offset);
                return false;
            }
            objects.push(figures::of_object(&object));
            true
        });
        Ok(json!({"objects": objects, "next": next}))
    }

    fn set(&self, request: &Value) -> Result<Value, String> {
        let bytes = |name: &str| match &request[name] {
            Value::Null => Ok(None),
            Value::String(none) if none == "none" => Ok(Some(None)),
            value => value
                .as_u64()
                .map(|bytes| Some(Some(bytes)))
                .ok_or_else(|| format!("{name}: {value} is not a size")),
        };
        let (limit, writeback) = (bytes("limit_bytes")?, bytes("writeback_limit_bytes")?);
        // Refusals come first, so that a refused request changes nothing.
        if writeback.is_some() && self.backing.stats().spill.is_none() {
            return Err(NO_FILE.to_string());
        }
        if let Some(limit) = limit {
            self.backing.set_limit_bytes(limit.unwrap_or(0)).map_err(|e| e.to_string())?;
        }
        if let Some(limit) = writeback {
            self.backing.set_writeback_limit(limit);
        }
        let stats = self.backing.stats();
        let rest = stats.spill.as_ref().and_then(|spill| spill.limit_left_bytes);
        Ok(json!({
            "limit_bytes": figures::limit(stats.limit_bytes),
            "writeback_limit_bytes": rest,
            "held_bytes": stats.held_bytes,
            "writes_back": stats.spill.is_some(),
        }))
    }

    fn idle(&self, request: &Value) -> Result<Value, String> {
        let age = Duration::from_secs(request["age_seconds"].as_u64().unwrap_or(0));
        self.backing.mark_idle(age);
        Ok(json!({}))
    }

    fn recompress(&self, request: &Value) -> Result<Value, String> {
        let codec =
            request["codec"].as_str().map(|text| CodecSpec::parse(text).map_err(|e| e.to_string()));
        let codec = codec.transpose()?.unwrap_or(self.codec);
        let bytes_min = request["bytes_min"].as_u64().unwrap_or(0).min(u32::MAX.into()) as u32;
        let result = self.backing.recompress(pick(request)?, codec, bytes_min);
        Ok(
            json!({"tried": result.tried, "smaller": result.smaller, "gained_bytes": result.gained_bytes}),
        )
    }

    fn write_back(&self, request: &Value) -> Result<Value, String> {
        let before = self.backing.stats().spill.ok_or(NO_FILE)?;
        let freed_bytes = self.backing.write_back(pick(request)?).unwrap_or(0);
        let after = self.backing.stats().spill.ok_or(NO_FILE)?;
        let written_bytes = after.written_bytes - before.written_bytes;
        // Errors of earlier requests are not reported again.
        let error = after
            .error
            .filter(|_| written_bytes == 0 || after.failed_writes > before.failed_writes);
        Ok(json!({"written_bytes": written_bytes, "freed_bytes": freed_bytes, "note": error}))
    }

    fn flush(&self) -> Result<Value, String> {
        self.exports.iter().try_for_each(|export| export.flush()).map_err(|e| e.to_string())?;
        Ok(json!({}))
    }

    fn export(&self, request: &Value) -> Result<&Arc<Export>, String> {
        let name = request["export"].as_str().unwrap_or("");
        let export = self.exports.iter().find(|export| export.name() == name);
        export.ok_or_else(|| format!("There is no export {name:?}."))
    }
}

const NO_FILE: &str =
    "The server has no file to write back to. Start memfold blk with --writeback DIR.";

fn pick(request: &Value) -> Result<ObjectPick, String> {
    let name = request["pick"].as_str().unwrap_or("idle");
    let all = [
        ("idle", ObjectPick::Idle),
        ("huge", ObjectPick::Huge),
        ("huge_idle", ObjectPick::HugeIdle),
        ("incompressible", ObjectPick::Incompressible),
        ("all", ObjectPick::All),
    ];
    all.iter()
        .find(|(known, _)| *known == name)
        .map(|(_, pick)| *pick)
        .ok_or_else(|| format!("{name:?} is not one of idle, huge, huge_idle, incompressible, all"))
}
