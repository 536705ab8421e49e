// Bugs of a client that misreads the rules of members, and of a server's host. Bugs of the machine are in
// tests/seeded/step_bugs.h. Names as the model of the rules had them.
#pragma once

namespace ballast::sim_members {

enum class Bug {
  kNone,
  // Client.
  kNoClaim,         // fences without a claim in the key
  kNoFence,         // asks servers for their state, and fences them only right before its Open
  kCasBlind,        // writes its table whatever the key has
  kOpenEarly,       // opens before the table is written
  kReadFirst,       // goes by a table that was read before the claim
  kBlind,           // claims nothing, and goes by the newest Open that servers have
  kServersSay,      // goes by the newest Open that servers have, not by the key
  kAbortUnknown,    // gives up a step that a missing member may have prepared
  kSomePrepared,    // adopts a step that only some have prepared
  kBelieve,         // an answer counts whatever disk and Open it is from
  kNoSince,         // an answer counts although the server never opened its table
  kNoCover,         // goes on although a shard has no copy
  kUnfilledCounts,  // counts a copy that is being filled
  kSettleEarly,     // drops holders before the fillers are full
  kNeverSettle,     // never drops a holder
  kDeadTarget,      // gives chunks to a server that does not answer
  kSurvivors,       // decides without a member that does not answer
  kCommitAtFence,   // commits an adopted step before the table is written
  // Host.
  kLabel,         // an export says the server's version, not the chunk's
  kFillerSource,  // a chunk that is being filled is exported
  kStaleInstall,  // an import may be older than what the server has applied
  kTwice,         // a step is applied to a chunk that was imported with it
  kReportEarly,   // a chunk counts as filled before its import is durable
  kReleaseEarly,  // a server that a wish is without frees its chunks at the fence
};

}  // namespace ballast::sim_members
