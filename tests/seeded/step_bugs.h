// Switches that each break a rule of the step transaction (services/step/README.md). A test checks that the simulation
// notices every switch.
#pragma once

namespace ballast::services {

enum class SeededBug {
  kNone,
  kPromiseNotSynced,            // a fence answers before its promise is durable
  kFenceMissesPrepareInFlight,  // a prepare in flight is neither reported by the fence nor void
  kPushIgnoresEpoch,            // pushes of older groups count
  kSealIgnoresEpoch,            // seals of older groups count
  kPreparedAnsweredUnsynced,    // `prepared` leaves the server before it is durable
  kPlanHashIgnored,             // ranks may seal different plans
  kCoverageIgnoresAttempt,      // coverage as a bitmap: slices of a dropped attempt still cover
  kLowerAttemptAccepted,        // a late slice of a dropped attempt replaces a newer one
  kPushAfterPrepared,           // slices may change after `prepared`
  kPushNextOncePrepared,        // slices of N + 1 are taken once N is prepared, before it is decided
  kPushEndUnchecked,            // a push is not checked again after its bytes came
  kPlaceShared,                 // two pushes write one place at a time
  kCommitAppliesAgain,          // a doubled commit is applied twice
  kCommitTrustsBlobs,           // the blobs come with the commit, not with the seal
  kOpenKeepsSlices,             // slices of older groups still cover
  kOpenKeepsPrepared,           // prepared(base + 1) of an older group survives Open
  kRecoveryPresumesCommit,      // a restarted server takes a prepared step for decided
  kDecisionAfterNextPrepared,   // prepared(N + 1) may be durable before decision(N)
  kSkipAdvancesStepCounts,      // t counts steps without an update
  kSnapshotForgetsPrepared,     // a log that begins with a snapshot does not know the prepared step
  kSnapshotForgetsStepCounts,   // ... or the number of updates of each tensor
  kRestoreWithoutPin,           // a restore is prepared by a server without the version
  kRestoreKeepsStepCounts,      // a restore brings back the state, but not its number of updates
  kUnpinWhileRestoring,         // a version is given up while its restore is prepared
  kPinNotAwaited,               // every-K: steps go on before the server's own pin is durable
  kPinDroppedByTheNext,         // every-K: a server's next pin drops its previous pin
  kLossNotTold,                 // every-K: a server that lost its state does not say so
  kUpdateOfLostState,           // every-K: an epoch that must begin with a restore begins with something else
  kRestoreKeepsPins,            // every-K: pins of versions that a restore gave up stay
  kSameName,                    // members: a server that was wiped is taken for the one that had its name
  kWipedHolds,                  // members: a server that lacks a chunk holds it
  kResetKeeps,                  // members: a server that begins at the base keeps chunks from before
  kOpenUnpromised,              // members: an Open counts although a newer epoch is promised
  kSlicesOfAnyGroup,            // members: slices of another group's epoch stay
  kTableNotSynced,              // members: an Open of another table is not durable when chunks are freed
  kOnlyOtherChunksSynced,       // members: ... is synced only if this server's chunks are others
  kNothingFreed,                // members: chunks that were given up are never freed
  kLeastVersionIgnored,         // members: an import may be older than a step that was prepared without the chunk
  kLeastVersionForgotten,       // members: a restart forgets the least version of an import
  kUnfilledForgotten,           // members: a restart takes chunks that are being filled for filled
  kFilledUndecided,             // members: a chunk is filled before its version's decision is durable
  kNormsOfFilledAlone,          // members: a prepared record lacks norms of chunks that are being filled
};

inline SeededBug seeded_bug = SeededBug::kNone;
inline bool Seeded(SeededBug bug) { return seeded_bug == bug; }

}  // namespace ballast::services
