// ballastctl: the operator's hand.
//
//   ballastctl status [--json] [--unused] --servers host:port,...
//   ballastctl top [--once] [--json] [--interval S] --servers host:port,...
//   ballastctl trace --job NAME [--out FILE] --servers host:port,...
//   ballastctl drop --job NAME --servers host:port,...
//   ballastctl members --job NAME [--restore] --servers etcd://host:port/prefix
//   ballastctl add --job NAME --server ID,... --servers etcd://host:port/prefix
//   ballastctl drain --job NAME --server ID,... --servers etcd://host:port/prefix
//   ballastctl remove --now --job NAME --server ID,... --servers etcd://host:port/prefix
//   ballastctl replace --job NAME --server ID --by ID --servers etcd://host:port/prefix
//   ballastctl replicas --job NAME --copies N --servers etcd://host:port/prefix
//   ballastctl accept-copy --server ID,... --servers etcd://host:port/prefix
//   ballastctl unpin --job NAME --version N --servers host:port,...
//   ballastctl budget [--hbm BYTES] [--dram BYTES] [--nvme BYTES] --servers host:port,...
//   ballastctl verify --data-directory DIR [--nvme DIR]... [--json] [--rebuild]
//   ballastctl iotune [--directory DIR] [--json] [--seconds N] [--out FILE] [--hbm-device N]
//   ballastctl doctor [--config FILE] [--servers host:port,...] [--json]
//   ballastctl completion bash|zsh|fish
//   ballastctl plan --params N --dram BYTES [--nvme BYTES] [--ranks N] [--server-count N] ...
//
// Exit codes. status: 0 healthy; 1 degraded (a server down, a job failed or its state lost, versions more than one
// apart); with --unused: 0 no server has a part of a job; 1 some has, or does not answer. top: as status with --once,
// else 0. trace: 0 all servers told; 1 not all. drop: 0 no server has the job any more; 1 some server did not drop it.
// members: 0 all members are registered (--restore: the key is written); 1 not. add, drain, remove, replace, replicas:
// 0 the wish is written; 1 refused. accept-copy: 0 the copies may start; 1 some may not. unpin: 0 no server keeps the
// version for a request any more; 1 some server may. budget: 0 all servers have the new budgets; 1 some refused.
// verify: 0 clean; 1 damage found; 3 a server has the directory. iotune: 0 measured, its profile written; 1 not. plan:
// 0 the job fits; 1 the job does not fit. doctor: 0 nothing stops a server; 1 something does. completion: 0. All: 2
// usage.
#include <signal.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ballast/proto/base/byte_sizes.h"
#include "ballast/proto/base/mutexes.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/registry/roster.h"
#include "ballast/services/daemon/config.h"
#include "ballast/services/journal/log_steps.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/monitoring/trace.h"
#include "ballast/services/tools/accept_copy_command.h"
#include "ballast/services/tools/budget_command.h"
#include "ballast/services/tools/cluster.h"
#include "ballast/services/tools/completion.h"
#include "ballast/services/tools/doctor/doctor_command.h"
#include "ballast/services/tools/drop_command.h"
#include "ballast/services/tools/iotune/iotune_command.h"
#include "ballast/services/tools/members_command.h"
#include "ballast/services/tools/plan_command.h"
#include "ballast/services/tools/top/top.h"
#include "ballast/services/tools/verify/verify_command.h"
#include "ballast/services/tools/wish_command.h"

namespace ballast::services {
namespace {

enum Exit { kHealthy = 0, kDegraded = 1, kUsage = 2 };

int Status(const std::vector<std::string>& servers, bool json, const Asking& asking) {
  const ClusterView cluster = JudgeByTwoLooks([&] { return LookAt(servers, asking); });
  std::fputs((json ? ShowJson(cluster) : ShowText(cluster)).c_str(), stdout);
  return cluster.problems.empty() ? kHealthy : kDegraded;
}

// Says what keeps servers from being taken out of service for good. Jobs that the caller may not see show by their
// state.
int Unused(const std::vector<std::string>& servers, const Asking& asking) {
  int code = kHealthy;
  for (const ServerView& server : LookAt(servers, asking)) {
    std::vector<std::string> uses;
    for (const v1::JobStatus& job : server.status.jobs()) {
      const std::string how = job.replicas() > 0 ? absl::StrCat("drain --job ", job.name(), " --server ",
                                                                server.status.server_id(), " --servers etcd://...")
                                                 : absl::StrCat("drop --job ", job.name(), " --servers ...");
      uses.push_back(absl::StrCat("has ", job.chunks(), " chunks of job '", job.name(), "': `ballastctl ", how, "`"));
    }
    const auto& tiers = server.status.tiers();
    const bool holds = std::any_of(tiers.begin(), tiers.end(), [](const auto& tier) { return tier.state_bytes() > 0; });
    if (holds && uses.empty()) uses.push_back("has state of jobs that you may not see");
    if (!server.error.ok()) uses.push_back(absl::StrCat("does not answer: ", server.error.message()));
    if (!uses.empty()) code = kDegraded;
    if (uses.empty()) uses.push_back("has no job");
    for (const std::string& use : uses) std::printf("%s: %s\n", server.address.c_str(), Printable(use).c_str());
  }
  return code;
}

int Trace(const std::vector<std::string>& servers, const std::string& job, const std::string& out,
          const Asking& asking) {
  std::vector<ServerSteps> seen;
  int code = kHealthy;
  for (const std::string& server : servers) {
    const absl::StatusOr<v1::JobSteps> steps = LastSteps(server, job, asking);
    if (steps.ok()) {
      seen.emplace_back(server, *steps);
    } else {
      std::fprintf(stderr, "%s: %s\n", server.c_str(), std::string(steps.status().message()).c_str());
      code = kDegraded;
    }
  }
  if (seen.empty()) return kDegraded;
  const std::string trace = ShowTrace(seen);
  if (out.empty()) {
    std::fputs(trace.c_str(), stdout);
    return code;
  }
  std::ofstream file(out);
  file << trace;
  file.close();
  if (file.good()) return code;
  std::fprintf(stderr, "%s cannot be written; name another file with --out\n", out.c_str());
  return kDegraded;
}

int Unpin(const std::vector<std::string>& servers, const std::string& job, int64_t version, const Asking& asking) {
  int code = kHealthy;
  for (const std::string& server : servers) {
    const absl::StatusOr<v1::UnpinResponse> answer = UnpinVersion(server, job, version, asking);
    if (answer.ok()) {
      std::printf("%s: unpinned version %lld of job '%s'%s\n", server.c_str(), static_cast<long long>(version),
                  job.c_str(),
                  answer->stays_automatic() ? ", which the server keeps for itself until it has a later one" : "");
      continue;
    }
    std::printf("%s: %s\n", server.c_str(), std::string(answer.status().message()).c_str());
    if (answer.status().code() != absl::StatusCode::kNotFound) code = kDegraded;
  }
  return code;
}

template <typename Bytes>
CLI::Option* AddBytes(CLI::App* command, const char* name, Bytes* to) {
  const auto parse = [name, to](const std::string& text) {
    const auto bytes = model::ParseBytes(text);
    if (!bytes.ok()) throw CLI::ValidationError(name, std::string(bytes.status().message()));
    *to = *bytes;
  };
  return command->add_option_function<std::string>(name, parse, "bytes, such as 512MiB");
}

int Complain(const absl::Status& status, Exit code) {
  std::fprintf(stderr, "ballastctl: --servers: %s\n", std::string(status.message()).c_str());
  return code;
}

void AddAccess(CLI::App* command, model::Access* to) {
  command->add_option("--ca", to->ca, "CAs of the servers (PEM); turns on TLS")->envname("BALLAST_CA");
  command->add_option("--certificate", to->certificate, "your certificate (PEM), with --key")
      ->envname("BALLAST_CERTIFICATE");
  command->add_option("--key", to->key, "your private key (PEM), with --certificate")->envname("BALLAST_KEY");
  command->add_option("--token-file", to->token_file, "your bearer token")->envname("BALLAST_TOKEN_FILE");
}

CLI::App* AddPlan(CLI::App& app, PlanCommand* to) {
  CLI::App* plan = app.add_subcommand("plan",
                                      "estimate what a job would need on servers and trainers, and how long its steps "
                                      "would take; exit 0 if it fits, 1 if not");
  plan->add_option("--params", to->parameters, "parameters of the model, such as 268435456, 7B or 1.5e9")->required();
  plan->add_option("--units", to->units, "layers of equal size")->capture_default_str()->check(CLI::Range(1, 1 << 20));
  plan->add_option("--ranks", to->ranks, "trainers")->capture_default_str()->check(CLI::Range(1, 1 << 16));
  plan->add_option("--server-count", to->servers, "equal state servers")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 12));
  AddBytes(plan, "--hbm", &to->budget.hbm);
  AddBytes(plan, "--dram", &to->budget.dram)->required();
  AddBytes(plan, "--nvme", &to->budget.nvme);
  AddBytes(plan, "--staging", &to->staging_bytes);
  plan->add_option("--optimizer", to->optimizer, "adamw, adam, sgd, adagrad, lion, ademamix or adamw_schedule_free")
      ->capture_default_str();
  plan->add_flag("--amsgrad", to->amsgrad, "adamw and adam with amsgrad, which keeps one moment more");
  plan->add_flag("--momentum", to->momentum, "sgd with momentum, which keeps a buffer");
  plan->add_option("--moments", to->moments, "f32, bf16, i8 or f8")->capture_default_str();
  plan->add_option("--master", to->master, "f32, or remainder: only the bits that bf16 working copies lack")
      ->capture_default_str();
  plan->add_option("--gradient-dtype", to->gradient, "bf16, f16 or f32")->capture_default_str();
  plan->add_option("--working-dtype", to->working, "bf16, f16, f32 or f8")->capture_default_str();
  plan->add_option("--durability", to->durability, "step, every-K or none")->capture_default_str();
  plan->add_option("--pin-interval", to->pin_interval, "the K of every-K, in steps");
  plan->add_option("--log-steps", to->log_steps, "steps that the gradient log holds, like the server's log_steps")
      ->check(CLI::Range(kLogStepsMin, kLogStepsConfiguredMax));
  plan->add_option("--threads", to->threads, "computing threads of each server")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  plan->add_option("--profile", to->machine_profile,
                   "profile of `iotune`; default: ballast-profile.yaml here, if it exists")
      ->type_name("FILE");
  plan->add_flag("--json", to->json, "print JSON");
  return plan;
}

std::vector<CLI::App*> AddWishes(CLI::App& app, WishCommand* to) {
  const auto command = [&](const char* name, WishCommand::Kind kind, const std::string& what) {
    CLI::App* const made = app.add_subcommand(name, what + ", while its group trains or when it starts next");
    made->add_option("--job", to->job, "name of the job, which has two or more copies")->required();
    made->final_callback([to, kind] { to->kind = kind; });
    return made;
  };
  CLI::App* const add = command("add", WishCommand::Kind::kAdd, "give a job more servers");
  CLI::App* const drain = command("drain", WishCommand::Kind::kDrain, "take servers from a job");
  CLI::App* const remove = command("remove", WishCommand::Kind::kRemove,
                                   "leave servers out at once, as if they did not answer, if others have all chunks; "
                                   "unless `drain` took them away, they join again and copy all anew");
  CLI::App* const replace = command("replace", WishCommand::Kind::kReplace, "give a job one server for another");
  CLI::App* const replicas = command("replicas", WishCommand::Kind::kReplicas, "change on how many servers chunks are");
  remove->add_flag("--now", to->now, "needed: nobody copies from the servers first, as `drain` has others do")
      ->required();
  for (CLI::App* const made : {add, drain, remove}) {
    made->add_option("--server", to->named, "ids of the servers, separated by commas")->required()->delimiter(',');
  }
  replace->add_option("--server", to->named, "id of the server that shall go")->required()->expected(1);
  replace->add_option("--by", to->by, "id of the server that shall come")->required();
  for (CLI::App* const made : {drain, replace}) {
    made->add_flag("--lost", to->lost, "the job went on without a server that is named: it is lost for good");
  }
  replicas->add_option("--copies", to->replicas, "copies of each chunk")->required()->check(CLI::Range(1, 4));
  return {add, drain, remove, replace, replicas};
}

int Main(int argc, char** argv) {
  CLI::App app{"Shows and administers Ballast state servers.", "ballastctl"};
  app.require_subcommand(1);
  app.get_formatter()->column_width(44);  // names and values on one line, as help2man expects
  app.set_version_flag("--version", std::string("ballastctl ") + model::Version());
  app.set_help_all_flag("--help-all", "Print this help message with all commands' options and exit");
  std::vector<std::string> servers;
  std::string job;
  bool json = false;
  double timeout_s = 5;
  Asking asking;

  CLI::App* status = app.add_subcommand(
      "status", "show verdict, servers, jobs, versions and tiers; exit 0 healthy, 1 degraded, 2 usage");
  CLI::Option* const as_json = status->add_flag("--json", json, "print JSON");
  bool unused = false;
  status
      ->add_flag("--unused", unused, "say what the servers have of jobs; exit 0 if nothing: you can stop them for good")
      ->excludes(as_json);
  TopOptions topping;
  double interval_s = 1;
  CLI::App* top = app.add_subcommand(
      "top", "show the status on the whole terminal and refresh it; keys: q quits, s sorts, 1 shows each server");
  top->add_flag("--once", topping.once, "print one frame as plain text; exit 0 healthy, 1 degraded");
  top->add_flag("--json", topping.json, "print a line of `status --json` for each frame");
  top->add_option("--interval", interval_s, "seconds between two frames")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 3600.0));
  CLI::App* trace = app.add_subcommand(
      "trace",
      "write a job's last 256 steps as a Chrome trace (chrome://tracing, Perfetto); exit 0 if all servers answered");
  std::string trace_file;
  trace->add_option("--job", job, "name of the job")->required();
  trace->add_option("--out", trace_file, "file to write; default: standard output");
  CLI::App* drop = app.add_subcommand("drop", "delete a job and its state on all servers");
  DropCommand dropping;
  drop->add_option("--job", dropping.job, "name of the job")->required();
  drop->add_option(
          "--lost", dropping.lost,
          "ids of the job's servers that will never come back, separated by commas; all others must be registered")
      ->delimiter(',');
  MembersCommand membership;
  CLI::App* members = app.add_subcommand("members", "show the servers of a job, by its key in etcd");
  members->add_option("--job", membership.job, "name of the job")->required();
  members->add_flag("--restore", membership.restore,
                    "write the key again, by what the job's servers know: etcd lost it, or has an older one");
  WishCommand wished;
  const std::vector<CLI::App*> wishes = AddWishes(app, &wished);
  AcceptCopyCommand copied;
  CLI::App* accept_copy = app.add_subcommand(
      "accept-copy", "let servers start on older copies of their data directories, such as restored backups");
  accept_copy->add_option("--server", copied.named, "ids of the servers, separated by commas")
      ->required()
      ->delimiter(',');
  CLI::App* unpin =
      app.add_subcommand("unpin", "give up a durable pin on all servers; its version can no longer be restored");
  int64_t version = -1;
  unpin->add_option("--job", job, "name of the job")->required();
  unpin->add_option("--version", version, "version of the pin, as `status` shows it")
      ->required()
      ->check(CLI::NonNegativeNumber);
  BudgetCommand budgets;
  CLI::App* budget =
      app.add_subcommand("budget", "set new budgets until the servers restart; chunks then move between tiers");
  AddBytes(budget, "--hbm", &budgets.hbm_bytes);
  AddBytes(budget, "--dram", &budgets.dram_bytes);
  AddBytes(budget, "--nvme", &budgets.nvme_bytes);
  PlanCommand planned;
  CLI::App* plan = AddPlan(app, &planned);
  VerifyCommand scrub;
  CLI::App* verify = app.add_subcommand("verify",
                                        "check the data directory of a stopped server; exit 0 clean, "
                                        "1 damage found, 2 usage, 3 a server uses it");
  verify->add_option("--data-directory", scrub.directory, "the server's data_directory")->required()->type_name("DIR");
  verify->add_option("--nvme", scrub.nvme, "a directory of budget.nvme, if the catalog is lost or the path is new")
      ->type_name("DIR");
  verify->add_flag("--json", scrub.json, "print JSON");
  verify->add_flag("--rebuild", scrub.rebuild, "rebuild the catalog's job entries from extents and logs");
  IotuneCommand tune;
  CLI::App* iotune =
      app.add_subcommand("iotune", "measure memory, disk and GPU link of this machine and write a profile");
  iotune->add_option("--directory", tune.directory, "directory on the disk to measure")->check(CLI::ExistingDirectory);
  iotune->add_option("--out", tune.out, "file for the profile; default: ballast-profile.yaml in the directory")
      ->type_name("FILE");
  iotune->add_option("--seconds", tune.seconds, "approximate duration")->check(CLI::PositiveNumber);
  iotune->add_option("--hbm-device", tune.hbm_device, "GPU whose link to measure")->check(CLI::NonNegativeNumber);
  iotune->add_flag("--json", tune.json, "print JSON");
  DoctorCommand examined;
  CLI::App* doctor = app.add_subcommand(
      "doctor", "find what stops or slows down a server on this machine; exit 0 if nothing stops it, else 1");
  doctor->add_option("--config", examined.config, "the server's YAML file; BALLAST_* variables apply too")
      ->type_name("FILE");
  doctor->add_flag("--json", examined.json, "print JSON");
  std::vector<CLI::App*> asks = {status, top, trace, drop, members, accept_copy, unpin, budget, doctor};
  asks.insert(asks.end(), wishes.begin(), wishes.end());
  for (CLI::App* command : asks) {
    command
        ->add_option("--servers", servers, "host:port of every server, separated by commas; or etcd://host:port/prefix")
        ->required(command != doctor)
        ->delimiter(',');
    command->add_option("--timeout", timeout_s, "seconds to wait for each server")
        ->capture_default_str()
        ->check(CLI::PositiveNumber);
    AddAccess(command, &asking.access);
  }
  std::string shell;
  CLI::App* completion = app.add_subcommand("completion", "print a script that makes a shell complete ballastctl");
  completion->add_option("shell", shell, "bash: eval \"$(ballastctl completion bash)\"; zsh and fish alike")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  model::StopDeadlockSearch();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kHealthy : kUsage;
  }
  spdlog::set_default_logger(spdlog::stderr_color_mt("ballastctl"));  // standard output is the answer's
  if (completion->parsed()) return std::fputs(CompletionScript(app, shell).c_str(), stdout) < 0;
  if (verify->parsed()) return RunVerify(scrub);
  if (iotune->parsed()) return RunIotune(tune);
  if (plan->parsed()) {
    spdlog::set_level(spdlog::level::warn);  // a temporary server answers
    return RunPlan(planned);
  }
  asking.timeout = absl::Seconds(timeout_s);
  if (const absl::Status named = registry::CheckServers(servers); !named.ok()) return Complain(named, kUsage);
  if (doctor->parsed()) {
    examined.servers = servers;
    examined.asking = asking;
    return RunDoctor(examined);
  }
  if (drop->parsed()) {
    dropping.servers = servers;
    dropping.asking = asking;
    return RunDrop(dropping);
  }
  if (members->parsed()) {
    membership.servers = servers;
    membership.asking = asking;
    return RunMembers(membership);
  }
  if (accept_copy->parsed()) {
    copied.servers = servers;
    copied.asking = asking;
    return RunAcceptCopy(copied);
  }
  if (std::any_of(wishes.begin(), wishes.end(), [](const CLI::App* one) { return one->parsed(); })) {
    wished.servers = servers;
    wished.asking = asking;
    return RunWish(wished);
  }
  const auto found = registry::FindServers(servers, asking.timeout);
  if (!found.ok()) return Complain(found.status(), kDegraded);
  servers = *found;
  if (top->parsed()) {
    topping.look = [&] { return LookAt(servers, asking); };
    topping.interval = absl::Seconds(interval_s);
    return RunTop(topping);
  }
  if (trace->parsed()) return Trace(servers, job, trace_file, asking);
  if (unpin->parsed()) return Unpin(servers, job, version, asking);
  if (budget->parsed()) {
    budgets.servers = servers;
    budgets.asking = asking;
    return RunBudget(budgets);
  }
  return unused ? Unused(servers, asking) : Status(servers, json, asking);
}

}  // namespace
}  // namespace ballast::services

int main(int argc, char** argv) {
  signal(SIGXFSZ, SIG_IGN);  // a file at the limit of its size is an error, which names the file
  return ballast::services::Main(argc, argv);
}
