#include "ballast/services/monitoring/server_families.h"

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "ballast/kernels/kernels.h"
#include "ballast/services/monitoring/error_reasons.h"
#include "ballast/storage/io/disk_counters.h"

namespace ballast::services {

void AddState(ServerState state, const RecoveryProgress& progress, Families* out) {
  Gauge states(out, "ballast_server_state", "1 for the state that the server is in.");
  for (const ServerState known : kServerStates) states.Add({{"state", ServerStateName(known)}}, known == state ? 1 : 0);
  Gauge(out, "ballast_recovery_bytes",
        "Recovery of the last run's jobs: states read and slices replayed, and how many there are to do.")
      .Add({{"kind", "done"}}, progress.done_bytes.load())
      .Add({{"kind", "total"}}, progress.total_bytes.load());
}

void AddServer(const v1::GetServerStatusResponse& status, const ServerFigures& figures, Families* out) {
  Gauge(out, "ballast_server_info",
        "Always 1; labels say who answers, by which I/O, whether DRAM is locked, and the kernels' instruction set.")
      .Add({{"server_id", status.server_id()},
            {"version", status.version()},
            {"io", absl::StartsWith(status.io_backend(), "io_uring") ? "io_uring" : "threads"},
            {"locked", figures.memory_locked ? "true" : "false"},
            {"cpu", kernels::ActiveIsa()}},
           1);
  Gauge(out, "ballast_uptime_seconds", "Seconds since the server started.").Add({}, status.uptime_seconds());
  Gauge(out, "ballast_compute_threads", "Threads that share one update, its job's own included.")
      .Add({}, figures.compute_threads);
  Counter(out, "ballast_compute_busy_seconds_total", "Seconds that threads have spent in pieces of updates.")
      .Add({}, figures.compute_busy_seconds);
}

void AddTiers(const v1::GetServerStatusResponse& status, const storage::TierTraffic& traffic,
              const ServerFigures& figures, Families* out) {
  Gauge capacity(out, "ballast_tier_capacity_bytes", "Budget of the tier.");
  Gauge used(out, "ballast_tier_used_bytes", "Bytes taken of the tier's budget.");
  Gauge parts(out, "ballast_tier_part_bytes",
              "The parts of a tier's used bytes, which sum to it. State on nvme: all versions on the disk, also of "
              "states that live in memory.");
  for (const v1::TierStatus& tier : status.tiers()) {
    capacity.Add({{"tier", tier.tier()}}, tier.capacity_bytes());
    used.Add({{"tier", tier.tier()}}, tier.used_bytes());
    for (const v1::TierPart& part : tier.parts()) {
      parts.Add({{"tier", tier.tier()}, {"part", part.part()}}, part.bytes());
    }
  }
  Gauge device(out, "ballast_nvme_device_bytes", "Of each directory of the nvme tier: its budget, and what is used.");
  for (const storage::TierUsage::Device& one : figures.nvme_devices) {
    device.Add({{"directory", one.directory}, {"kind", "budget"}}, one.budget);
    device.Add({{"directory", one.directory}, {"kind", "used"}}, one.used);
  }
  Counter read(out, "ballast_tier_read_bytes_total", "Bytes read from the tier.");
  Counter written(out, "ballast_tier_written_bytes_total", "Bytes written to the tier.");
  Counter moved(out, "ballast_moved_bytes_total", "Bytes of states and slices that went from one tier to another.");
  for (size_t from = 0; from < storage::kTierKinds; ++from) {
    const char* const from_name = storage::TierName(static_cast<storage::TierKind>(from));
    read.Add({{"tier", from_name}}, traffic.read[static_cast<storage::TierKind>(from)]);
    written.Add({{"tier", from_name}}, traffic.written[static_cast<storage::TierKind>(from)]);
    for (size_t to = 0; to < storage::kTierKinds; ++to) {
      for (size_t why = 0; why < storage::kMoveReasons; ++why) {
        const bool disk = static_cast<storage::TierKind>(from) == storage::TierKind::kNvme ||
                          static_cast<storage::TierKind>(to) == storage::TierKind::kNvme;
        // Without a GPU most pairs never come; those of disk and memory are there from the start.
        const bool common = disk && from != to && storage::TierKind::kHbm != static_cast<storage::TierKind>(from) &&
                            storage::TierKind::kHbm != static_cast<storage::TierKind>(to);
        if (!common && figures.moved[from][to][why] == 0) continue;
        moved.Add({{"from", from_name},
                   {"to", storage::TierName(static_cast<storage::TierKind>(to))},
                   {"why", storage::kMoveReasonNames[why]}},
                  figures.moved[from][to][why]);
      }
    }
  }
}

void AddGpu(const storage::GpuCounters& gpu, Families* out) {
  const auto seconds = [](const std::atomic<int64_t>& nanoseconds) {
    return 1e-9 * static_cast<double>(nanoseconds.load());
  };
  Counter(out, "ballast_gpu_copied_bytes_total", "Bytes copied from memory to the GPU (in), and back (out).")
      .Add({{"direction", "in"}}, gpu.in.bytes.load())
      .Add({{"direction", "out"}}, gpu.out.bytes.load());
  Counter(out, "ballast_gpu_copies_total", "Copies from memory to the GPU (in), and back (out).")
      .Add({{"direction", "in"}}, gpu.in.count.load())
      .Add({{"direction", "out"}}, gpu.out.count.load());
  Counter(out, "ballast_gpu_kernels_total", "Kernels launched on the GPU.").Add({}, gpu.kernels.load());
  Counter(out, "ballast_gpu_wait_seconds_total",
          "Seconds that threads waited for the GPU: for updates with their copies, and for copies of pulls and moves.")
      .Add({{"work", "update"}}, seconds(gpu.update_wait_nanoseconds))
      .Add({{"work", "copy"}}, seconds(gpu.copy_wait_nanoseconds));
}

void AddCalls(const ServerCounters& counters, const ServerFigures& figures, Families* out) {
  {
    Histogram seconds(out, "ballast_rpc_duration_seconds", "From a request's arrival to its answer, waiting included.");
    for (size_t i = 0; i < kCalls; ++i) seconds.Add({{"method", kCallNames[i]}}, counters.calls[i]);
    Counter errors(out, "ballast_rpc_errors_total", "Requests answered with an error, by reason.");
    auto counts = counters.errors.Get();
    // From zero on, or a rate would miss the first error of its kind.
    for (const auto& [call, reason] : ExpectedErrors()) counts.try_emplace({call, reason}, 0);
    for (const auto& [key, count] : counts) {
      errors.Add({{"method", kCallNames[static_cast<size_t>(key.first)]}, {"reason", key.second}}, count);
    }
  }
  Gauge(out, "ballast_waiting_requests", "Requests that wait for a version, a slice or a sync.")
      .Add({}, figures.waiting_requests.used);
  Gauge(out, "ballast_waiting_requests_limit", "Bound of ballast_waiting_requests; beyond it requests are BUSY.")
      .Add({}, figures.waiting_requests.max);
  Gauge(out, "ballast_waiting_bytes", "Memory of waiting requests: messages, and payloads of pushes.")
      .Add({{"what", "requests"}}, figures.waiting_request_bytes.used)
      .Add({{"what", "pushes"}}, figures.waiting_push_bytes.used);
  Gauge(out, "ballast_waiting_bytes_limit", "Bounds of ballast_waiting_bytes; beyond them requests are BUSY.")
      .Add({{"what", "requests"}}, figures.waiting_request_bytes.max)
      .Add({{"what", "pushes"}}, figures.waiting_push_bytes.max);
  Gauge(out, "ballast_unsent_bytes", "Answers to pulls that are not sent yet.").Add({}, figures.unsent_bytes.used);
  Gauge(out, "ballast_unsent_bytes_limit", "Bound of ballast_unsent_bytes; beyond it pulls wait.")
      .Add({}, figures.unsent_bytes.max);
  const SharedMemoryCounters& shared = *counters.shared_memory;
  Counter(out, "ballast_shared_memory_bytes_total",
          "Payload bytes that clients on this host pushed (in) and pulled (out) through memory that they share with "
          "the server, instead of over the network.")
      .Add({{"direction", "in"}}, shared.in_bytes.load())
      .Add({{"direction", "out"}}, shared.out_bytes.load());
  Gauge(out, "ballast_shared_memory_mapped_bytes", "Memory that clients on this host share with the server.")
      .Add({}, shared.mapped_bytes.load());
  Gauge(out, "ballast_shared_memory_mapped_bytes_limit",
        "Bound of ballast_shared_memory_mapped_bytes; beyond it clients send over the network.")
      .Add({}, shared.mapped_bytes_max.load());
  Gauge(out, "ballast_jobs", "Jobs on this server, lost jobs included.").Add({}, figures.job_places.used);
  Gauge(out, "ballast_jobs_limit", "Bound of ballast_jobs.").Add({}, figures.job_places.max);
}

void AddDisk(const ServerFigures& figures, Families* out) {
  const storage::DiskCounters& disk = storage::ProcessDiskCounters();
  Histogram seconds(out, "ballast_disk_operation_seconds",
                    "From a request to the disk to its end, what stands before it included.");
  Counter bytes(out, "ballast_disk_bytes_total",
                "Bytes read from and written to the files of the data directory, without the catalog's.");
  Counter errors(out, "ballast_disk_errors_total", "Operations of the disk that failed.");
  for (size_t i = 0; i < storage::DiskCounters::kOperations; ++i) {
    const Labels labels = {{"op", storage::DiskCounters::kOperationNames[i]}};
    const storage::DiskCounters::Operation& operation = disk.operations[i];
    seconds.Add(labels, operation.seconds);
    errors.Add(labels, operation.errors.load());
    if (std::string(storage::DiskCounters::kOperationNames[i]) != "sync") bytes.Add(labels, operation.bytes.load());
  }
  Gauge(out, "ballast_disk_inflight", "Requests that wait for the disk, or that the disk works on.")
      .Add({}, disk.in_flight.load());
  Gauge(out, "ballast_file_system_bytes", "The file system of the data directory.")
      .Add({{"kind", "size"}}, figures.file_system_bytes.max)
      .Add({{"kind", "free"}}, figures.file_system_bytes.max - figures.file_system_bytes.used);
}

void AddRepairs(uint64_t wire, Families* out) {
  const storage::DiskCounters& disk = storage::ProcessDiskCounters();
  Counter(out, "ballast_checksum_mismatches_total",
          "Bytes that differed from their checksum: on the wire (sent again), in a log, in an extent.")
      .Add({{"where", "wire"}}, wire)
      .Add({{"where", "log"}}, disk.wrong_payloads.load())
      .Add({{"where", "extent"}}, disk.wrong_extents.load());
  Counter(out, "ballast_repaired_total",
          "Damage that was repaired: a log's block from its second copy, a slice's block from its parity.")
      .Add({{"what", "log_block"}}, disk.repaired_log_blocks.load())
      .Add({{"what", "payload_block"}}, disk.repaired_payloads.load());
}

}  // namespace ballast::services
