// Switches that break one rule of storage or of recovery each, for the test that the simulations notice.
//
// Only libraries of the test build are compiled with BALLAST_SEEDED_BUGS; everywhere else Seeded() is constexpr false
// and the branches vanish. Those of the step transaction: services/step/seeded_bugs.h.
#pragma once

namespace ballast::storage {

enum class StorageBug {
  kNone,

  // The gradient log.
  kSyncDropped,            // what was written is called durable without a sync
  kSyncBeforeWritten,      // a sync counts batches whose writes are still under way
  kSyncBeforeHead,         // ... or whose segment's head is
  kFailedSyncIgnored,      // EIO of a sync is success
  kFailedSyncRetried,      // ... or is tried again, which then says OK of pages that the first one lost
  kExtensionSyncForgiven,  // ... or, of new segments, leaves the log going on
  kFailedWriteIgnored,     // EIO of a write is success
  kMarkBeforeSync,         // the mark names a batch before the sync that makes it durable
  kSaltConstant,           // an opening's segments cannot be told from those that a crash made void
  kIncarnationReused,      // an opening counts on from the newest live segment, not from the newest ever seen
  kCutOneStepEarly,        // segments are cut although the step that needs them may be replayed
  kCutBeforeSnapshot,      // segments are cut before the snapshot that stands in for them is durable
  kFreedBeforeCutDurable,  // a cut segment is written over before a crash would know of the cut
  kReleasedTooMuch,        // a new epoch frees slices of steps that are decided
  kReopenSyncDropped,      // what a restart read and was never synced is called durable
  kHeadBeforeContent,      // a new log has its head before the rest of it is durable
  kFailedCreationLeft,     // a log that could not be made is left behind
  kBatchDigestUnchecked,   // a torn batch is read as whole
  kTornPayloadAccepted,    // ... or one whose payloads are
  kRottenTakenForTorn,     // a batch that was durable and cannot be read is the end of the log
  kRottenPayloadServed,    // a payload that is not what was written is replayed
  kVoidCutBelieved,        // a batch that never was durable cuts the log
  kSegmentEndIgnored,      // what an earlier opening left behind a segment's end is read
  kPayloadLeaseDropped,    // a slice's memory may be written to before the log has it

  // Extents of chunks.
  kExtentSyncDropped,         // versions are recorded before they are durable
  kFailedExtentSyncIgnored,   // ... or although the sync failed
  kFailedExtentWriteIgnored,  // ... or although the write failed
  kFailedRecordIgnored,       // old versions are freed although new ones could not be recorded
  kOldFreedBeforeRecord,      // ... or before they are
  kOverwrittenInPlace,        // a new version is written over the old one
  kLabelWithoutVersion,       // an extent does not say which version it holds
  kRestoreDigestUnchecked,    // rotten state is taken back at a restart
  kLoadDigestUnchecked,       // ... or into an update
  kKeptExtentsGivenAgain,     // recovered chunks' extents are free
  kFlushedChunkStaysClean,    // changed state counts as flushed
  kUnrecordedCountsAsKept,    // the log is cut at versions that no restart would find, since they are not recorded yet
  kReadBackUnchecked,         // a slice that is not what was logged is applied

  // The server.
  kAckedUnsynced,       // answers leave before the journal is durable
  kPromiseUnsynced,     // a promise is put into the catalog without a sync
  kPromiseNotAwaited,   // a fence is answered before the catalog has its promise
  kCutAtCommit,         // the log is cut at the decided step, whatever is flushed
  kVersionAhead,        // a chunk is recorded as one step newer than it is
  kReplayedTwice,       // steps are replayed on chunks that have them
  kOldEpochReplayed,    // slices of an older epoch are replayed
  kUndecidedForgotten,  // slices of the step in flight are counted as there, and are not
  kOldPlaceReadBack,    // a slice that is pushed again is read back where it was first
  kSegmentsForgotten,   // what segments are needed for is forgotten at a restart
};

#ifdef BALLAST_SEEDED_BUGS
inline StorageBug seeded_bug = StorageBug::kNone;
inline bool Seeded(StorageBug bug) { return seeded_bug == bug; }
#else
constexpr bool Seeded(StorageBug) { return false; }
#endif

}  // namespace ballast::storage
