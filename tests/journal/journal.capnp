# What a journal holds, on disk and in the shared-memory tail, in Cap'n Proto's own language: messages of one segment, unpacked,
# without a segment table, each behind a record header (journal/record.h). `capnp decode` reads them with this file.
#
# AMem itself derives the same from the structs of statemachine/event.h. This file is what was promised: layout_test.cpp finds
# each member of each struct here, under its name, in its place, with its type and its default, and says what is to be added.
# Rules for changes, because old journals stay readable for ever:
#   * Fields are only ever added, at the end, and a new field's default must be the old behaviour.
#   * A new kind of event must go to the end of the union in Event and of EventBody: its place in both must be the same number.
#     A reader that must not skip it needs kJournalFormat and kJournalLeastReader to rise.
#   * Ordinals, names of union members and values of enums must not be reused.
@0xd3a7be2f6c1e90b5;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("amem::wire");

struct Journal {            # the values of the table "meta": 1, and one for each time that the wall clock was set
  format @0 :UInt32;        # must be 1 for this schema
  leastReader @1 :UInt32;   # must be at most the reader's format
  session @2 :UInt64;       # must be the directory's name
  pid @3 :Int32;
  realtimeNs @4 :UInt64;    # wall clock when it was opened or the clock was set
  monotonicNs @5 :UInt64;   # CLOCK_MONOTONIC then; 0: not noted
}

struct Event {
  seq @0 :UInt64;     # must be the key of the record; 0 in a snapshot
  timeNs @1 :UInt64;  # CLOCK_MONOTONIC of the host
  thread @2 :UInt32;

  union {  # the discriminant must be the index in EventBody
    sessionOpened @3 :SessionOpened;
    sessionClosed @4 :SessionClosed;
    sessionBroken @5 :SessionBroken;
    groupChanged @6 :GroupChanged;
    libraryAttached @7 :LibraryAttached;
    driverSymbolBound @8 :DriverSymbolBound;
    rangeReserved @9 :RangeReserved;
    rangeFreed @10 :RangeFreed;
    allocationCreated @11 :AllocationCreated;
    allocationRetained @12 :AllocationRetained;
    allocationReleased @13 :AllocationReleased;
    mapped @14 :Mapped;
    unmapped @15 :Unmapped;
    accessSet @16 :AccessSet;
    exported @17 :Exported;
    imported @18 :Imported;
    referenceAdded @19 :ReferenceAdded;
    referenceDropped @20 :ReferenceDropped;
    peerConnected @21 :PeerConnected;
    peerLost @22 :PeerLost;
    hostAllocated @23 :HostAllocated;
    hostFreed @24 :HostFreed;
    legacyAllocated @25 :LegacyAllocated;
    legacyFreed @26 :LegacyFreed;
    legacyExported @27 :LegacyExported;
    legacyImported @28 :LegacyImported;
    legacyClosed @29 :LegacyClosed;
    asyncAllocated @30 :AsyncAllocated;
    asyncFreed @31 :AsyncFreed;
    multicastCreated @32 :MulticastCreated;
    multicastDeviceAdded @33 :MulticastDeviceAdded;
    multicastBound @34 :MulticastBound;
    multicastUnbound @35 :MulticastUnbound;
    registered @36 :Registered;
    deregistered @37 :Deregistered;
    passedThrough @38 :PassedThrough;
    cycleBegun @39 :CycleBegun;
    stepBegun @40 :StepBegun;
    stepDone @41 :StepDone;
    stepFailed @42 :StepFailed;
    phaseBegun @43 :PhaseBegun;
    phaseDecided @44 :PhaseDecided;
    cycleDone @45 :CycleDone;
    cycleFailed @46 :CycleFailed;
    condensed @47 :Condensed;
    slabOpened @48 :SlabOpened;
    placed @49 :Placed;
    backed @50 :Backed;
    partCleared @51 :PartCleared;
    communicatorBegun @52 :CommunicatorBegun;
    communicatorReady @53 :CommunicatorReady;
    communicatorEnded @54 :CommunicatorEnded;
    communicatorSuspended @55 :CommunicatorSuspended;
    voteCast @56 :VoteCast;
    memberHeard @57 :MemberHeard;
    processSeen @58 :ProcessSeen;
    threadSeen @59 :ThreadSeen;
    launchRefused @60 :LaunchRefused;
    poolOpened @61 :PoolOpened;
    poolAllocated @62 :PoolAllocated;
    poolFreed @63 :PoolFreed;
    requestSeen @64 :RequestSeen;
    safepointReached @65 :SafepointReached;
    requestEnded @66 :RequestEnded;
    frozen @67 :Frozen;
    everythingKept @68 :EverythingKept;
    freezeStep @69 :FreezeStep;
    sharedOutside @70 :SharedOutside;
    regionKept @71 :RegionKept;
    ballotShown @72 :BallotShown;
  }
}

# ---- values --------------------------------------------------------------------------------------------------------------
# An id, an address or a number of bytes is a UInt64; what it means is in statemachine/types.h.

struct AllocationProperties {  # CUmemAllocationProp, whole
  type @0 :UInt32 = 1;
  handleTypes @1 :UInt32;
  locationType @2 :UInt32;  # CUmemLocationType, also values this build does not know
  locationId @3 :Int32;
  compression @4 :UInt8;
  gpuDirectRdma @5 :UInt8;
  usage @6 :UInt16;
  reserved @7 :UInt32;
}
struct AccessDescriptor {
  locationType @0 :UInt32;
  locationId @1 :Int32;
  flags @2 :UInt32;
}
struct CallSite {  # offsets in libnccl, innermost first
  frame0 @0 :UInt64;
  frame1 @1 :UInt64;
  frame2 @2 :UInt64;
  frame3 @3 :UInt64;
  frame4 @4 :UInt64;
}
struct RemoteAllocation {
  owner @0 :UInt64;
  allocation @1 :UInt64;
}

# ---- life of a session ---------------------------------------------------------------------------------------------------

struct SessionOpened {
  session @0 :UInt64;
  host @1 :Text;
  pid @2 :Int32;
  bootId @3 :Text;
  amemVersion @4 :Text;
  driverVersion @5 :Text;
  ncclVersion @6 :Text;
  gpuUuids @7 :List(Text);
  group @8 :Int64;
  rank @9 :Int32 = -1;
  realtimeNs @10 :UInt64;
  monotonicNs @11 :UInt64;
  layout @12 :Text;
  content @13 :Text;
  launcher @14 :List(Text);
  program @15 :Text;
  python @16 :Bool;
  timeoutMs @17 :UInt32;
}
struct SessionClosed {
  reason @0 :Text;
  exitCode @1 :Int32 = -1;
}
struct SessionBroken { reason @0 :Text; }
struct GroupChanged { group @0 :Int64; }
struct LibraryAttached {
  path @0 :Text;
  buildId @1 :Text;
  way @2 :Text;
  ncclVersion @3 :Text;
  loadAddress @4 :UInt64;
}
struct DriverSymbolBound {
  name @0 :Text;
  cudaVersion @1 :Int32;
  replaced @2 :Bool;
}

# ---- address ranges, allocations, mappings -------------------------------------------------------------------------------

struct RangeReserved {
  address @0 :UInt64;
  bytes @1 :UInt64;
  alignment @2 :UInt64;
  hint @3 :UInt64;
  flags @4 :UInt64;
  site @5 :CallSite;
  allocation @6 :UInt64;  # at its place in a slab; 0: the driver's call
  pool @7 :UInt32;
}
struct RangeFreed {
  address @0 :UInt64;
  bytes @1 :UInt64;
  allocation @2 :UInt64;
}
struct AllocationCreated {
  allocation @0 :UInt64;
  bytes @1 :UInt64;
  properties @2 :AllocationProperties;
  flags @3 :UInt64;
  handle @4 :UInt64;
  site @5 :CallSite;
  created @6 :UInt64;
  tag @7 :MemoryTag;
  communicator @8 :UInt64;
  pool @9 :UInt32;
}
struct AllocationRetained {
  allocation @0 :UInt64;
  address @1 :UInt64;
}
struct AllocationReleased { allocation @0 :UInt64; }
struct Mapped {
  address @0 :UInt64;
  bytes @1 :UInt64;
  offset @2 :UInt64;
  allocation @3 :UInt64;
  flags @4 :UInt64;
}
struct Unmapped {
  address @0 :UInt64;
  bytes @1 :UInt64;
  allocation @2 :UInt64;
}
struct AccessSet {
  address @0 :UInt64;
  bytes @1 :UInt64;
  access @2 :List(AccessDescriptor);
  allocation @3 :UInt64;
}

# ---- sharing -------------------------------------------------------------------------------------------------------------

struct Exported {
  allocation @0 :UInt64;
  handleType @1 :UInt32 = 1;
  library @2 :Text;
}
struct Imported {
  allocation @0 :UInt64;
  remote @1 :RemoteAllocation;
  bytes @2 :UInt64;
  properties @3 :AllocationProperties;
  handleType @4 :UInt32 = 1;
  handle @5 :UInt64;
  site @6 :CallSite;
  created @7 :UInt64;
  tag @8 :MemoryTag;
  communicator @9 :UInt64;
  pool @10 :UInt32;
}
struct ReferenceAdded {
  allocation @0 :UInt64;
  by @1 :UInt64;
  as @2 :UInt64;
}
struct ReferenceDropped {
  allocation @0 :UInt64;
  by @1 :UInt64;
  as @2 :UInt64;
}
struct PeerConnected {
  peer @0 :UInt64;
  host @1 :Text;
  pid @2 :Int32;
  group @3 :Int64;
  rank @4 :Int32 = -1;
}
struct PeerLost {
  peer @0 :UInt64;
  reason @1 :Text;
}

# ---- other kinds of memory -----------------------------------------------------------------------------------------------

struct HostAllocated {
  address @0 :UInt64;
  bytes @1 :UInt64;
  flags @2 :UInt32;
  registered @3 :Bool;
}
struct HostFreed { address @0 :UInt64; }
struct LegacyAllocated {
  address @0 :UInt64;
  bytes @1 :UInt64;
  backing @2 :UInt64;
  offset @3 :UInt64;
  why @4 :Text;
  site @5 :CallSite;
  communicator @6 :UInt64;
}
struct LegacyFreed { address @0 :UInt64; }
struct LegacyExported { address @0 :UInt64; backing @1 :UInt64; }
struct LegacyImported { address @0 :UInt64; allocation @1 :UInt64; }
struct LegacyClosed { address @0 :UInt64; }
struct AsyncAllocated { address @0 :UInt64; bytes @1 :UInt64; }
struct AsyncFreed { address @0 :UInt64; }
struct MulticastCreated {
  allocation @0 :UInt64;
  bytes @1 :UInt64;
  devices @2 :UInt32;
  handleTypes @3 :UInt32;
  flags @4 :UInt64;
  handle @5 :UInt64;
  tag @6 :MemoryTag;
  incomplete @7 :Bool;
}
struct MulticastDeviceAdded { multicast @0 :UInt64; device @1 :Int32; }
struct MulticastBound {
  multicast @0 :UInt64;
  multicastOffset @1 :UInt64;
  allocation @2 :UInt64;
  allocationOffset @3 :UInt64;
  bytes @4 :UInt64;
  address @5 :UInt64;
}
struct MulticastUnbound {
  multicast @0 :UInt64;
  device @1 :Int32;
  multicastOffset @2 :UInt64;
  bytes @3 :UInt64;
}
struct Registered {
  address @0 :UInt64;
  bytes @1 :UInt64;
  how @2 :Text;
  library @3 :Text;
  region @4 :UInt64;
  card @5 :Text;
  domain @6 :UInt64;
  accessFlags @7 :UInt32;
  flags @8 :UInt64;
  pins @9 :Text;
}
struct Deregistered { address @0 :UInt64; bytes @1 :UInt64; library @2 :Text; region @3 :UInt64; }
struct RegionKept { region @0 :UInt64; why @1 :Text; }
struct EverythingKept { why @0 :Text; }
struct SharedOutside { library @0 :Text; kind @1 :OutsideKind; pieces @2 :UInt64; bytes @3 :UInt64; }
struct PassedThrough {
  name @0 :Text;
  detail @1 :Text;
  result @2 :Int32;
}

# ---- pause and resume ----------------------------------------------------------------------------------------------------
# The numbers of these must be those of the enums of the same name in event.h and types.h; a reader rejects others. `pool`
# is whose pause or resume an event belongs to; 0: NCCL's.

using CycleKind = UInt8;
using PhaseKind = UInt8;
using StepKind = UInt8;
using Code = UInt8;
using MemoryTag = UInt8;
using PoolPolicy = UInt8;
using OutsideKind = UInt8;
using Ballot = UInt8;
using Cause = UInt8;
using Vote = UInt8;

struct Step {
  kind @0 :StepKind;
  allocation @1 :UInt64;
  address @2 :UInt64;
  bytes @3 :UInt64;
  device @4 :Int32;
  offset @5 :UInt64;
  region @6 :UInt64;
}
struct CycleMember {
  session @0 :UInt64;
  rank @1 :Int32 = -1;
  pid @2 :Int32;
  host @3 :Text;
}
struct CycleBegun {
  kind @0 :CycleKind;
  cycle @1 :UInt64;
  members @2 :List(UInt64);
  processes @3 :List(CycleMember);
  pool @4 :UInt32;
  keeps @5 :Bool;
}
struct StepBegun { step @0 :Step; pool @1 :UInt32; }
struct StepDone { step @0 :Step; pool @1 :UInt32; }
struct StepFailed {
  step @0 :Step;
  code @1 :Code;
  driverResult @2 :Int32;
  message @3 :Text;
  reportedBy @4 :UInt64;
  pool @5 :UInt32;
  holders @6 :List(MemoryHolder);
}
struct MemoryHolder { pid @0 :Int32; bytes @1 :UInt64; name @2 :Text; }
struct PhaseBegun { phase @0 :PhaseKind; pool @1 :UInt32; }
struct PhaseDecided {
  phase @0 :PhaseKind;
  passed @1 :Bool = true;
  culprit @2 :UInt64;
  message @3 :Text;
  code @4 :Code;
  driverResult @5 :Int32;
  pool @6 :UInt32;
}
struct CycleDone {
  kind @0 :CycleKind;
  cycle @1 :UInt64;
  durationNs @2 :UInt64;
  pool @3 :UInt32;
  changed @4 :UInt64; unchanged @5 :UInt64; zero @6 :UInt64;  # bytes of contents in a pause
}
struct CycleFailed {
  kind @0 :CycleKind;
  cycle @1 :UInt64;
  undone @2 :Bool = true;
  message @3 :Text;
  code @4 :Code;
  driverResult @5 :Int32;
  culprits @6 :List(CycleMember);
  pool @7 :UInt32;
  paused @8 :Bool;
}
struct Condensed {
  through @0 :UInt64;
  nextAllocation @1 :UInt64 = 1;
  cycles @2 :UInt64;
  totals @3 :List(UInt64);
}

# ---- slabs ---------------------------------------------------------------------------------------------------------------

struct ByteRange {
  offset @0 :UInt64;
  bytes @1 :UInt64;
}
struct SlabOpened {
  slab @0 :UInt64;
  address @1 :UInt64;
  dirty @2 :List(ByteRange);
}
struct Placed {
  allocation @0 :UInt64;
  slab @1 :UInt64;
  offset @2 :UInt64;
  touched @3 :Bool;
}
struct Backed { allocation @0 :UInt64; handle @1 :UInt64; }
struct PartCleared {
  slab @0 :UInt64;
  offset @1 :UInt64;
  bytes @2 :UInt64;
}

# ---- communicators -------------------------------------------------------------------------------------------------------

struct CommunicatorBegun {
  communicator @0 :UInt64;
  parent @1 :UInt64;
  how @2 :Text;
  rank @3 :Int32 = -1;
  ranks @4 :Int32;
}
struct CommunicatorReady {
  communicator @0 :UInt64;
  hash @1 :UInt64;
  rank @2 :Int32 = -1;
  ranks @3 :Int32;
  device @4 :Int32;
}
struct CommunicatorEnded {
  communicator @0 :UInt64;
  how @1 :Text;
}
struct CommunicatorSuspended { communicator @0 :UInt64; suspended @1 :Bool = true; }

# ---- what was seen -------------------------------------------------------------------------------------------------------

struct VoteCast {
  phase @0 :PhaseKind;
  ok @1 :Bool = true;
  code @2 :Code;
  message @3 :Text;
  pool @4 :UInt32;
}
struct MemberHeard {
  member @0 :UInt64;
  kind @1 :CycleKind;
  phase @2 :PhaseKind;
  voted @3 :Bool;
  ok @4 :Bool = true;
  rank @5 :Int32 = -1;
  pid @6 :Int32;
  asks @7 :Bool;
}
struct ProcessSeen {
  session @0 :UInt64;
  pid @1 :Int32;
  state @2 :Text;
  where @3 :Text;
  answer @4 :Text;
  exitCode @5 :Int32 = -1;
  waitedNs @6 :UInt64;
}
struct ThreadSeen {
  thread @0 :UInt32;
  name @1 :Text;
  state @2 :Text;
  where @3 :Text;
  stack @4 :List(Text);
}
struct SeatShown {
  session @0 :UInt64;
  rank @1 :Int32 = -1;
  pid @2 :Int32;
  host @3 :Text;
  vote @4 :Vote;
  votedNs @5 :UInt64;
  end @6 :Text;
  endSeen @7 :Text;
}
struct BallotShown {
  kind @0 :CycleKind;
  cycle @1 :UInt64;
  pool @2 :UInt32;
  board @3 :UInt64;
  round @4 :UInt32;
  ballot @5 :Ballot;
  cause @6 :Cause;
  by @7 :UInt64;
  culprits @8 :List(UInt64);
  members @9 :UInt32;
  yes @10 :UInt32;
  firstNs @11 :UInt64;
  seats @12 :List(SeatShown);
  message @13 :Text;
  code @14 :Code;
  driverResult @15 :Int32;
}
struct LaunchRefused {
  call @0 :Text;
  count @1 :UInt64 = 1;
}

# ---- pools ---------------------------------------------------------------------------------------------------------------

struct PoolOpened { pool @0 :UInt32; tag @1 :Text; policy @2 :PoolPolicy; cycles @3 :UInt64; }
struct PoolAllocated { address @0 :UInt64; bytes @1 :UInt64; device @2 :Int32; backing @3 :UInt64; offset @4 :UInt64; }
struct PoolFreed { address @0 :UInt64; }

# ---- requests from outside -----------------------------------------------------------------------------------------------

struct RequestSeen { request @0 :UInt64; kind @1 :CycleKind; byPid @2 :Int32; target @3 :UInt64; allTags @4 :Bool; }
struct SafepointReached { request @0 :UInt64; step @1 :UInt64; }
struct RequestEnded { request @0 :UInt64; kind @1 :CycleKind; code @2 :Code; message @3 :Text; bytes @4 :UInt64; }
struct Frozen { fromNs @0 :UInt64; toNs @1 :UInt64; bytes @2 :UInt64; movedGpus @3 :Text; }

struct GpuPair { from @0 :Text; to @1 :Text; }
struct GpuShare { gpu @0 :Text; before @1 :UInt64; taken @2 :UInt64; }
struct FreezeMember { session @0 :UInt64; pid @1 :Int32; startTicks @2 :UInt64; name @3 :Text; }
struct FreezeStep {
  begunNs @0 :UInt64;
  command @1 :UInt64;
  goal @2 :Text;
  step @3 :Text;
  done @4 :Bool;
  outcome @5 :Text;
  message @6 :Text;
  pauses @7 :Bool;
  fromNs @8 :UInt64;
  members @9 :List(FreezeMember);
  gpus @10 :List(GpuShare);
  pairs @11 :List(GpuPair);
  moved @12 :List(GpuPair);
}
