// A short training run in processes of its own: command lines of the example, and what processes say of the run.
#pragma once

#include <string>
#include <vector>

namespace ballast {

// Trains a small model; prints a digest of its weights at the end. TRAINER and TEXT name the program and its text.
std::vector<std::string> TrainerCommand(int steps);
// The same as rank `rank` of `world_size`, which meet in `rendezvous`. `servers`: separated by commas.
std::vector<std::string> RankCommand(int steps, const std::string& servers, const std::string& rendezvous, int rank,
                                     int world_size);
// The digest that a trainer printed; other text where it printed none.
std::string DigestIn(const std::string& output);
// The last step that a trainer with `--log-every 1` has told; -1 before the first.
int LastStepIn(const std::string& output);
// The digest of a run without servers and without faults.
std::string ReferenceDigest(int steps, const std::vector<std::string>& more = {});

// The version of the only job on `servers` by `ballastctl status`, which also gets `access`; -1 before the first.
int VersionOn(const std::string& servers, const std::vector<std::string>& access = {});

}  // namespace ballast
