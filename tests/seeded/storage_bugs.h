// Switches that each break a rule of storage or of recovery. A test checks that the simulations notice every switch.
// The switches of the step transaction are in step_bugs.h.
#pragma once

namespace ballast::storage {

enum class StorageBug {
  kNone,

  // The gradient log.
  kSyncDropped,            // written batches are called durable without a sync
  kSyncBeforeWritten,      // a sync counts batches whose writes are still under way
  kSyncBeforeHead,         // ... or whose segment head is still being written
  kFailedSyncIgnored,      // EIO of a sync is success
  kFailedSyncRetried,      // ... or the sync is tried again, and says OK although the first sync lost pages
  kExtensionSyncForgiven,  // ... or the log goes on after a failed sync of new segments
  kFailedWriteIgnored,     // EIO of a write is success
  kMarkBeforeSync,         // the mark names a batch before the batch is durable
  kSaltConstant,           // an opening's segments look like segments that a crash made void
  kIncarnationReused,      // an opening counts on from the newest live segment, not from the newest ever seen
  kCutOneStepEarly,        // segments are cut although the step that needs them may be replayed
  kCutBeforeSnapshot,      // segments are cut before the snapshot that stands in for them is durable
  kFreedBeforeCutDurable,  // a cut segment is written over before a crash would know of the cut
  kReleasedTooMuch,        // a new epoch frees slices of steps that are decided
  kReopenSyncDropped,      // batches read at a restart, but never synced, are called durable
  kHeadBeforeContent,      // a new log has its head before the rest of it is durable
  kFailedCreationLeft,     // the file of a log that could not be made stays
  kBatchDigestUnchecked,   // a torn batch is read as whole
  kTornPayloadAccepted,    // ... or a batch with torn payloads
  kRottenTakenForTorn,     // an unreadable batch that was durable is taken for the end of the log
  kRottenPayloadServed,    // a damaged payload is replayed
  kVoidCutBelieved,        // a batch that never was durable cuts the log
  kSegmentEndIgnored,      // leftovers of an earlier opening behind a segment's end are read
  kPayloadLeaseDropped,    // a slice's memory may be written to before the log has it

  // Extents of chunks.
  kExtentSyncDropped,         // versions are recorded before they are durable
  kFailedExtentSyncIgnored,   // ... or although the sync failed
  kFailedExtentWriteIgnored,  // ... or although the write failed
  kFailedRecordIgnored,       // old versions are freed although new ones could not be recorded
  kOldFreedBeforeRecord,      // ... or before the new versions are recorded
  kOverwrittenInPlace,        // a new version is written over the old one
  kLabelWithoutVersion,       // an extent does not say which version it holds
  kRestoreDigestUnchecked,    // rotten state is taken back at a restart
  kMomentsUnchecked,          // ... or its moments, which the first update after the restart reads
  kLoadDigestUnchecked,       // ... or into an update
  kKeptExtentsGivenAgain,     // recovered chunks' extents are free
  kFlushedChunkStaysClean,    // changed state counts as flushed
  kUnrecordedCountsAsKept,    // the log is cut at versions that are not recorded, so no restart would find them
  kPulledCopyOutlivesUpdate,  // pulls of a chunk without a working copy get the parameters before its update
  kCarryDropped,              // a master is rounded down where its working copy was rounded up
  kRemainderOutlivesValues,   // values overwrite a working copy beside the remainder of others
  kPinInheritsRemainder,      // a pin keeps a remainder without the working copy that goes with it
  kReadBackUnchecked,         // a damaged slice from the log is applied
  kDeviceNotRecorded,         // an entry says that its extent is in the data directory, wherever it is
  kOtherDevicesUnsynced,      // versions on several devices are recorded after a sync of one
  kDeviceKnownByItsPath,      // a file is taken for the one that was at its path, whatever it says

  // The scrub.
  kScrubDigestUnchecked,  // rot is not seen
  kScrubBelievesMovedOn,  // a state that changed between two pieces is taken for rotten
  kScrubRewritesDirty,    // an extent is written from memory that holds a newer state
  kScrubSyncDropped,      // an extent counts as mended before it is durable

  // The server.
  kAckedUnsynced,       // answers leave before the journal is durable
  kPromiseUnsynced,     // a promise is put into the catalog without a sync
  kPromiseNotAwaited,   // a fence is answered before the catalog has its promise
  kCutAtCommit,         // the log is cut at the decided step, whatever is flushed
  kVersionAhead,        // a chunk is recorded as one step newer than it is
  kReplayedTwice,       // steps are replayed on chunks that have the steps already
  kOldEpochReplayed,    // slices of an older epoch are replayed
  kKeptReleased,        // the group's own next epoch keeps slices, and the log does not
  kKeptNotReplayed,     // ... or a restart does not find them
  kUndecidedForgotten,  // slices of the step in flight count as present, but are missing
  kOldPlaceReadBack,    // a slice that was pushed again is read back from its first place
  kSegmentsForgotten,   // a restart forgets up to which step segments are needed

  // Chunks that come and go.
  kFilledBeforeDurable,  // a copied chunk counts as filled before it is on the disk
  kOldStateIsCopy,       // a restart takes any state on the disk for a copy that is to be made
  kPassedOverIsCopy,     // ... or a copy that a later step has passed over
  kFreedBeforeErase,     // extents of chunks that were given up are freed while the catalog names them
  kEntriesStay,          // entries of chunks that were given up stay
};

inline StorageBug seeded_bug = StorageBug::kNone;
inline bool Seeded(StorageBug bug) { return seeded_bug == bug; }

}  // namespace ballast::storage
