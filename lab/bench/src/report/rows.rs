//! The table of all requirements, and of the tests and figures that show each.

/// What shows that a requirement is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownBy {
    /// A test: its file from the root of the repository, and its name.
    Test(&'static str, &'static str),
    /// The figures of a benchmark whose labels have this prefix. An empty prefix selects all.
    Figures(&'static str, &'static str),
}

/// A requirement.
pub struct Requirement {
    /// Its name, which never changes.
    pub name: &'static str,
    /// A summary.
    pub what: &'static str,
    /// What shows it; empty if nothing does.
    pub shown: &'static [ShownBy],
    /// Its known gaps; empty if there are none.
    pub lacks: &'static str,
}

use ShownBy::{Figures, Test};

const FULL_POOL: ShownBy =
    Test("engine/engine/tests/swap.rs", "m9_z10_full_pool_is_packed_and_loaded_block_by_block");
const COLD_OBJECTS: ShownBy =
    Test("block/src/device/tests/cold.rs", "idle_and_huge_blocks_are_written_back");

/// All requirements, in order.
pub const REQUIREMENTS: &[Requirement] = &[
    Requirement {
        name: "Z1",
        what: "the store takes a folio of any order without splitting it",
        shown: &[Test(
            "engine/store/src/store/tests/promises.rs",
            "z1_z8_all_orders_and_codecs_return_their_bytes",
        )],
        lacks: "",
    },
    Requirement {
        name: "Z2",
        what: "same-filled pages are told apart inside a folio",
        shown: &[Test(
            "engine/store/src/store/tests/promises.rs",
            "z2_same_filled_pages_are_told_apart_inside_a_block",
        )],
        lacks: "",
    },
    Requirement {
        name: "Z3",
        what: "a save is all or nothing",
        shown: &[
            Test(
                "engine/store/src/store/tests/faults.rs",
                "z3_a_fault_in_any_block_leaves_nothing",
            ),
            Test(
                "engine/store/src/store/tests/faults.rs",
                "z3_full_pool_keeps_no_part_and_saves_again_after_frees",
            ),
            Test(
                "engine/engine/tests/faults.rs",
                "z3_c1_thread_delivery_loses_nothing_under_faults",
            ),
        ],
        lacks: "",
    },
    Requirement {
        name: "Z4",
        what: "a refused folio goes whole to the device, or stays resident and active",
        shown: &[
            Test(
                "engine/engine/tests/swap.rs",
                "z4_incompressible_folio_is_written_whole_in_one_write",
            ),
            Test(
                "engine/engine/tests/refused.rs",
                "z4_incompressible_data_stays_and_is_not_retried_each_fault",
            ),
        ],
        lacks: "",
    },
    Requirement {
        name: "Z5",
        what: "counters on success only, per order, and their sums",
        shown: &[
            Test("engine/stats/src/lib.rs", "sums_are_checked_against_orders"),
            Test("engine/engine/tests/refusals.rs", "z3_z5_codec_failure_keeps_the_folio_resident"),
        ],
        lacks: "",
    },
    Requirement {
        name: "Z6",
        what: "pool memory counts against the limit, or by a switch not",
        shown: &[
            Test("engine/engine/tests/region.rs", "z10_a_full_pool_refuses_and_the_bytes_stay"),
            Figures("usemem", "--pool-counts off of on"),
            Figures("usemem", "memory held: data for each byte, memfold:lz4:64k"),
        ],
        lacks: "",
    },
    Requirement {
        name: "Z7",
        what: "verify mode",
        shown: &[
            Test(
                "engine/store/src/store/tests/promises.rs",
                "z7_verify_mode_saves_the_same_and_counts_nothing",
            ),
            Test(
                "engine/engine/tests/refusals.rs",
                "z7_a_verify_mismatch_is_counted_and_the_folio_is_kept",
            ),
            Test("engine/engine/tests/faults.rs", "z7_verify_mode_loses_nothing_under_faults"),
        ],
        lacks: "",
    },
    Requirement {
        name: "Z8",
        what: "codecs by name, switched while data is stored; canned mode",
        shown: &[
            Test(
                "engine/store/src/store/tests/promises.rs",
                "z8_objects_are_read_with_their_own_codec_after_a_switch",
            ),
            Test(
                "engine/engine/tests/region.rs",
                "z8_canned_mode_makes_the_pool_smaller_and_keeps_every_byte",
            ),
            Figures("store", "canned "),
            Figures("blocks", "deflate, blocks of 16K"),
        ],
        lacks: "",
    },
    Requirement {
        name: "Z9",
        what: "batched compression over a submit and complete interface",
        shown: &[
            Test(
                "engine/store/src/store/tests/offload.rs",
                "z9_batching_hides_the_latency_of_a_slow_device",
            ),
            Test("engine/engine/tests/region.rs", "z9_batches_keep_every_byte"),
            Figures("store", "lz4: batches"),
            Figures("store", "zstd: batches"),
        ],
        lacks: "",
    },
    Requirement {
        name: "Z10",
        what: "max_pool and accept_threshold; a shrinker with a second chance",
        shown: &[
            Test(
                "engine/store/src/store/tests/cold.rs",
                "z10_full_pool_accepts_saves_again_below_the_threshold",
            ),
            Test(
                "engine/store/src/store/tests/cold.rs",
                "z10_the_shrinker_names_what_was_not_used_since_its_last_look",
            ),
            FULL_POOL,
            COLD_OBJECTS,
        ],
        lacks: "",
    },
    Requirement {
        name: "Z-bench",
        what: "usemem, 64 KiB and 2 MiB folios, against zram and zswap",
        shown: &[Figures("usemem", "")],
        lacks: "",
    },
    Requirement {
        name: "M1",
        what: "block order 0 to 9 is a tunable",
        shown: &[
            Test(
                "engine/store/src/store/tests/promises.rs",
                "z1_z8_all_orders_and_codecs_return_their_bytes",
            ),
            Figures("blocks", "lz4, blocks of"),
        ],
        lacks: "",
    },
    Requirement {
        name: "M2",
        what: "size classes, compaction, figures of efficiency",
        shown: &[
            Test(
                "engine/store/src/store/tests/promises.rs",
                "m2_compaction_empties_sparse_spans_and_keeps_every_byte",
            ),
            Test(
                "engine/store/src/store/tests/promises.rs",
                "m2_efficiency_stays_high_under_churn",
            ),
            Figures("store", "stored of held"),
        ],
        lacks: "",
    },
    Requirement {
        name: "M3",
        what: "a part of a block is read and written through the whole block",
        shown: &[
            Test(
                "engine/store/src/store/tests/partial.rs",
                "m7_pages_of_a_block_come_from_one_decompression",
            ),
            Test(
                "engine/engine/src/tests/fault.rs",
                "m3_m7_pages_at_rest_share_one_decompression_of_a_block",
            ),
            Test(
                "engine/engine/src/tests/ranges.rs",
                "m3_m5_discard_inside_a_stored_block_keeps_its_other_pages",
            ),
        ],
        lacks: "",
    },
    Requirement {
        name: "M4",
        what: "a block goes when its last page goes",
        shown: &[
            Test(
                "engine/engine/tests/refusals.rs",
                "discard_loads_a_block_that_the_store_refuses_by_page",
            ),
            Test("engine/engine/tests/swap.rs", "a_discard_that_cuts_a_raw_block_takes_no_frame"),
            Test("block/src/device/tests/mod.rs", "m4_a_blocks_object_goes_with_its_last_page"),
        ],
        lacks: "",
    },
    Requirement {
        name: "M5",
        what: "counters of block reads, writes, failures, parts",
        shown: &[
            Test("engine/stats/src/lib.rs", "names_are_unique_and_helped"),
            Test(
                "engine/engine/src/tests/ranges.rs",
                "m3_m5_discard_inside_a_stored_block_keeps_its_other_pages",
            ),
            Test("engine/engine/tests/refusals.rs", "z3_z5_codec_failure_keeps_the_folio_resident"),
        ],
        lacks: "deferred frees: there are none, a block that a discard cuts is stored again page by page at once",
    },
    Requirement {
        name: "M6",
        what: "the fallback to small pages, and the knob that forces it",
        shown: &[Figures("store", "all loads on small pages")],
        lacks: "",
    },
    Requirement {
        name: "M7",
        what: "recently decompressed blocks are kept in a cache",
        shown: &[
            Test(
                "engine/store/src/store/tests/partial.rs",
                "m7_a_freed_block_is_forgotten_and_the_oldest_is_replaced",
            ),
            Test(
                "engine/store/src/store/tests/partial.rs",
                "m7_no_thread_reads_a_stale_block_from_the_cache",
            ),
            Test(
                "engine/engine/src/tests/fault.rs",
                "m7_consecutive_page_loads_decompress_their_block_once",
            ),
            Test(
                "engine/engine/src/tests/fault.rs",
                "m3_m7_pages_at_rest_share_one_decompression_of_a_block",
            ),
        ],
        lacks: "",
    },
    Requirement {
        name: "M8",
        what: "a reserve of large frames",
        shown: &[
            Test(
                "engine/engine/src/memory/tests.rs",
                "m8_a_reserve_of_large_frames_is_left_to_large_folios",
            ),
            Test("run/cli/src/report/json.rs", "no_figure_is_hidden_by_a_fact_about_the_run"),
            Figures("usemem", "large frames had at once, %, memfold:lz4:"),
        ],
        lacks: "",
    },
    Requirement {
        name: "M9",
        what: "writeback, recompression, marks on whole blocks",
        shown: &[
            Test(
                "engine/store/src/store/tests/cold.rs",
                "m9_idle_and_huge_objects_become_smaller_and_keep_their_bytes",
            ),
            Test(
                "engine/engine/tests/region.rs",
                "m9_cold_blocks_are_compressed_again_while_the_program_reads",
            ),
            FULL_POOL,
            COLD_OBJECTS,
        ],
        lacks: "",
    },
    Requirement {
        name: "M10",
        what: "a block-device front end",
        shown: &[
            Test(
                "block/src/device/tests/mod.rs",
                "m10_random_unaligned_requests_match_a_byte_vector",
            ),
            Test(
                "block/src/device/tests/mod.rs",
                "m3_whole_block_write_reads_nothing_and_part_changes_its_page",
            ),
            Test(
                "block/src/device/tests/mod.rs",
                "discard_gives_the_memory_back_and_is_exact_to_the_byte",
            ),
            Test(
                "e2e/suites/block/blk.rs",
                "fio_verifies_what_it_wrote_in_mixed_sizes_at_512_bytes",
            ),
        ],
        lacks: "",
    },
    Requirement {
        name: "M-bench",
        what: "100 MiB out and in, 4 KiB against 16 KiB blocks, and with all loads on small pages",
        shown: &[
            Figures("store", "zstd, 16K of 4K blocks"),
            Figures("store", "all loads on small pages"),
            Figures("blocks", "zstd, blocks of"),
        ],
        lacks: "",
    },
    Requirement {
        name: "P1",
        what: "N pools, an entry always in the same one",
        shown: &[Test(
            "engine/store/src/store/tests/promises.rs",
            "p1_a_key_always_picks_the_same_pool_and_keys_spread_over_all",
        )],
        lacks: "",
    },
    Requirement {
        name: "P2",
        what: "ten workloads at once, one pool against many",
        shown: &[
            Figures("pools", ""),
            Figures("store", "10 workloads"),
            Figures("store", "the default, "),
        ],
        lacks: "",
    },
    Requirement {
        name: "S1",
        what: "the slot allocator: every order aligned in one cluster",
        shown: &[Test("engine/swap/src/tests/cluster.rs", "s1_agrees_with_a_bitmap")],
        lacks: "",
    },
    Requirement {
        name: "S2",
        what: "order 0 takes every free slot",
        shown: &[Test(
            "engine/swap/src/tests/cluster.rs",
            "s2_order_0_takes_every_free_slot_from_every_cluster",
        )],
        lacks: "",
    },
    Requirement {
        name: "S3",
        what: "no run left: split and retry smaller, counted",
        shown: &[Test(
            "engine/engine/tests/swap.rs",
            "s3_full_file_is_used_to_the_last_slot_then_memory_grows",
        )],
        lacks: "",
    },
    Requirement {
        name: "S4",
        what: "contiguous slots are freed in one operation",
        shown: &[Test(
            "engine/swap/src/tests/cluster.rs",
            "s4_emptied_cluster_is_discarded_once_with_its_neighbour",
        )],
        lacks: "",
    },
    Requirement {
        name: "S5",
        what: "page out and cold act on whole folios",
        shown: &[
            Test(
                "engine/engine/src/tests/ranges.rs",
                "s5_page_out_and_cold_act_on_whole_folios_without_splitting",
            ),
            Test(
                "engine/engine/src/tests/ranges.rs",
                "s5_only_a_folio_that_the_range_cuts_is_split_first",
            ),
            Test(
                "engine/engine/src/tests/ranges.rs",
                "s5_partly_discarded_folio_is_split_and_evicted_in_pieces",
            ),
        ],
        lacks: "",
    },
    Requirement {
        name: "S6",
        what: "counts stay exact under racing allocators",
        shown: &[Test("engine/swap/tests/models.rs", "s6_racing_allocators_keep_the_counts_exact")],
        lacks: "",
    },
    Requirement {
        name: "S-bench",
        what: "usemem on the swap file by folio size; ageing without fallback",
        shown: &[
            Test(
                "engine/swap/src/tests/cluster.rs",
                "s_ageing_has_no_fallback_while_there_is_space",
            ),
            Figures("swap", "raw to the file, folios of"),
            Figures("swap", "slots after"),
            Figures("swap", "of kernel swap"),
            Figures("usemem", "folios of"),
        ],
        lacks: "",
    },
    Requirement {
        name: "C1",
        what: "one path: every swap-in goes through the swap cache",
        shown: &[
            Test("engine/engine/tests/models.rs", "c1_a_fault_and_an_eviction_keep_every_byte"),
            Test("engine/engine/tests/property.rs", "c1_c2_thread_delivery_agrees_with_a_shadow"),
        ],
        lacks: "",
    },
    Requirement {
        name: "C2",
        what: "one reader for each folio, the others sleep",
        shown: &[
            Test("engine/engine/tests/models.rs", "c2_two_faults_load_a_block_once"),
            Test(
                "engine/engine/tests/swap.rs",
                "c2_many_threads_that_wait_for_one_folio_cause_one_read",
            ),
            Test(
                "engine/engine/tests/reads.rs",
                "pool_fault_is_served_while_a_device_read_is_stalled",
            ),
            Figures("swap", "1 thread(s) touch"),
            Figures("swap", "16 thread(s) touch"),
        ],
        lacks: "",
    },
    Requirement {
        name: "C3",
        what: "one entry for a folio of any order",
        shown: &[
            Test("engine/engine/src/folio/index.rs", "one_entry_serves_a_large_folio"),
            Figures("walk", "index and metadata"),
            Figures("swap", "index memory"),
            Figures("swap", "1 TiB touched"),
        ],
        lacks: "",
    },
    Requirement {
        name: "C4",
        what: "shadows record age; refault distance decides",
        shown: &[
            Test("engine/engine/tests/swap.rs", "c4_a_hot_set_survives_a_scan"),
            Test(
                "engine/engine/src/policy/workingset.rs",
                "near_refaults_are_active_and_far_ones_are_not",
            ),
            Figures("swap", "loads of hot"),
        ],
        lacks: "",
    },
    Requirement {
        name: "C5",
        what: "no false look-ups",
        shown: &[
            Test(
                "engine/engine/src/tests/fault.rs",
                "c5_a_fault_looks_nowhere_but_where_its_page_is",
            ),
            Test("engine/engine/src/folio/index.rs", "agrees_with_a_map"),
        ],
        lacks: "",
    },
    Requirement {
        name: "C6",
        what: "read-ahead for slow stores only; clean copies kept",
        shown: &[
            Test(
                "engine/engine/tests/swap.rs",
                "c6_reading_ahead_from_the_file_is_counted_and_used",
            ),
            Test(
                "engine/engine/tests/swap.rs",
                "c6_a_clean_copy_in_the_file_costs_no_second_write",
            ),
            Test(
                "engine/engine/src/policy/swap_readahead.rs",
                "the_window_grows_by_hits_and_closes_without",
            ),
            Figures("swap", "raw folios read in order"),
        ],
        lacks: "",
    },
    Requirement {
        name: "C7",
        what: "the index is sharded; the effect of shard size is measured",
        shown: &[Figures("swap", "4 threads, a lock of the index")],
        lacks: "",
    },
    Requirement {
        name: "C-bench",
        what: "sequential out and in of zeros and real data; a database; memcached",
        shown: &[
            Figures("pools", "sequential"),
            Figures("apps", "mariadb"),
            Figures("apps", "memcached"),
        ],
        lacks: "",
    },
    Requirement {
        name: "B1",
        what: "unmodified programs under memfold run",
        shown: &[
            Test(
                "e2e/suites/managed/programs.rs",
                "concurrent_discard_unmap_and_remap_keep_own_bytes",
            ),
            Test("e2e/suites/managed/fork.rs", "parent_and_child_of_fork_both_find_every_byte"),
            Test("e2e/suites/managed/real.rs", "stress_ng_verifies_its_memory"),
            Test("e2e/suites/managed/programs.rs", "mremap_moves_grows_and_shrinks_folded_memory"),
            Figures("apps", ""),
            Figures("walk", "fill, under run"),
        ],
        lacks: "",
    },
    Requirement {
        name: "B2",
        what: "libraries: Rust, C, Python",
        shown: &[Test("engine/engine/tests/region.rs", "thread_delivery_keeps_every_byte")],
        lacks: "C and Python",
    },
    Requirement {
        name: "B3",
        what: "tiers: memory, pool, encrypted file, remote store",
        shown: &[
            Test("e2e/suites/storage/swap.rs", "b3_incompressible_data_survives_the_swap_file"),
            Test("engine/swap/src/seal.rs", "sealed_bytes_come_back_and_every_change_is_refused"),
            Test("e2e/suites/storage/remote.rs", "b3_every_byte_comes_back_and_no_key_is_left"),
            Test("remote/tests/library.rs", "b3_keys_outlive_expiry_only_while_the_run_lives"),
            Figures("swap", "of kernel swap"),
        ],
        lacks: "",
    },
    Requirement {
        name: "B4",
        what: "block devices: NBD, vhost-user-blk",
        shown: &[
            Test("e2e/suites/block/blk.rs", "files_copied_over_several_connections_come_out_equal"),
            Test("e2e/suites/block/blk.rs", "it_is_asked_and_told_while_it_serves"),
            Test(
                "e2e/suites/block/blk.rs",
                "excess_data_goes_to_a_file_and_a_full_file_is_no_room",
            ),
            Test("block/tests/vhost/operations.rs", "every_byte_is_what_was_last_written"),
        ],
        lacks: "",
    },
    Requirement {
        name: "B5",
        what: "live view, metrics, fault profile, a report with plots",
        shown: &[Test("lab/bench/src/report/html.rs", "page_is_self_contained")],
        lacks: "live view, Prometheus metrics, fault profile",
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_named_test_exists() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for requirement in REQUIREMENTS {
            for evidence in requirement.shown {
                let Test(file, name) = evidence else { continue };
                let text = std::fs::read_to_string(root.join(file))
                    .unwrap_or_else(|e| panic!("{file}: {e}"));
                let lines: Vec<&str> = text.lines().map(str::trim).collect();
                let at = lines.iter().position(|line| line.starts_with(&format!("fn {name}(")));
                let at =
                    at.unwrap_or_else(|| panic!("{}: {file} has no test {name}", requirement.name));
                let is_test =
                    lines[at.saturating_sub(4)..at].iter().any(|line| line.contains("#[test]"));
                assert!(is_test, "{}: {file}: {name} is no test", requirement.name);
            }
        }
    }

    #[test]
    fn every_row_is_there_once() {
        let rows =
            |letter: char, count: u32| (1..=count).map(move |number| format!("{letter}{number}"));
        let mut names = Vec::new();
        for (letter, count, bench) in [
            ('Z', 10, true),
            ('M', 10, true),
            ('P', 2, false),
            ('S', 6, true),
            ('C', 7, true),
            ('B', 5, false),
        ] {
            names.extend(rows(letter, count));
            names.extend(bench.then(|| format!("{letter}-bench")));
        }
        let requirement_names: Vec<&str> =
            REQUIREMENTS.iter().map(|requirement| requirement.name).collect();
        assert_eq!(requirement_names, names);
    }
}
