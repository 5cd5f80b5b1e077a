// The fields of everything that a message can hold, for writing and reading alike.
#pragma once

#include "journal/codec.h"
#include "journal/codec_values.h"

namespace amem::codec {

AMEM_CARRY(FileMeta, Format, LeastReader, Session, Pid, RealtimeNs)

// ---- life of a session ---------------------------------------------------------------------------------------------------

AMEM_CARRY(SessionOpened, Session, Host, Pid, BootId, AmemVersion, DriverVersion, NcclVersion, GpuUuids, Group, Rank,
           RealtimeNs, MonotonicNs, Layout, Content, Launcher)
AMEM_CARRY(SessionClosed, Reason, ExitCode)
AMEM_CARRY(SessionBroken, Reason)
AMEM_CARRY(GroupChanged, Group)
AMEM_CARRY(LibraryAttached, Path, BuildId, Way, NcclVersion, LoadAddress)
AMEM_CARRY(DriverSymbolBound, Name, CudaVersion, Replaced)

// ---- address ranges, allocations, mappings -------------------------------------------------------------------------------

AMEM_CARRY(RangeReserved, Address, Bytes, Alignment, Hint, Flags, Site, Allocation, Pool)
AMEM_CARRY(RangeFreed, Address, Bytes, Allocation)
AMEM_CARRY(AllocationCreated, Allocation, Bytes, Properties, Flags, Handle, Site, Created, Tag, Communicator, Pool)
AMEM_CARRY(AllocationRetained, Allocation, Address)
AMEM_CARRY(AllocationReleased, Allocation)
AMEM_CARRY(Mapped, Address, Bytes, Offset, Allocation, Flags)
AMEM_CARRY(Unmapped, Address, Bytes, Allocation)
AMEM_CARRY(AccessSet, Address, Bytes, Access, Allocation)

// ---- sharing -------------------------------------------------------------------------------------------------------------

AMEM_CARRY(Exported, Allocation, HandleType)
AMEM_CARRY(Imported, Allocation, Remote, Bytes, Properties, HandleType, Handle, Site, Created, Tag, Communicator, Pool)
AMEM_CARRY(ReferenceAdded, Allocation, By, As)
AMEM_CARRY(ReferenceDropped, Allocation, By, As)
AMEM_CARRY(PeerConnected, Peer, Host, Pid, Group, Rank)
AMEM_CARRY(PeerLost, Peer, Reason)

// ---- other kinds of memory -----------------------------------------------------------------------------------------------

AMEM_CARRY(HostAllocated, Address, Bytes, Flags, Registered)
AMEM_CARRY(HostFreed, Address)
AMEM_CARRY(LegacyAllocated, Address, Bytes, Backing, Offset, Why, Site, Communicator)
AMEM_CARRY(LegacyFreed, Address)
AMEM_CARRY(LegacyExported, Address, Backing)
AMEM_CARRY(LegacyImported, Address, Allocation)
AMEM_CARRY(LegacyClosed, Address)
AMEM_CARRY(AsyncAllocated, Address, Bytes)
AMEM_CARRY(AsyncFreed, Address)
AMEM_CARRY(MulticastCreated, Allocation, Bytes, Devices, HandleTypes, Flags, Handle, Tag, Incomplete)
AMEM_CARRY(MulticastDeviceAdded, Multicast, Device)
AMEM_CARRY(MulticastBound, Multicast, MulticastOffset, Allocation, AllocationOffset, Bytes, Address)
AMEM_CARRY(MulticastUnbound, Multicast, Device, MulticastOffset, Bytes)
AMEM_CARRY(Registered, Address, Bytes, How)
AMEM_CARRY(Deregistered, Address, Bytes)
AMEM_CARRY(PassedThrough, Name, Detail, Result)
AMEM_CARRY(EverythingKept, Why)

// ---- pause and resume ----------------------------------------------------------------------------------------------------

AMEM_CARRY(CycleBegun, Kind, Cycle, Members, Processes, Pool)
AMEM_CARRY(StepBegun, Step, Pool)
AMEM_CARRY(StepDone, Step, Pool)
AMEM_CARRY(StepFailed, Step, Code, DriverResult, Message, ReportedBy, Pool)
AMEM_CARRY(PhaseBegun, Phase, Pool)
AMEM_CARRY(PhaseDecided, Phase, Passed, Culprit, Message, Code, DriverResult, Pool)
AMEM_CARRY(CycleDone, Kind, Cycle, DurationNs, Pool, Changed, Unchanged, Zero)
AMEM_CARRY(CycleFailed, Kind, Cycle, Undone, Message, Code, DriverResult, Culprits, Pool)
AMEM_CARRY(Condensed, Through, NextAllocation, Cycles, Totals)

// ---- slabs ---------------------------------------------------------------------------------------------------------------

AMEM_CARRY(SlabOpened, Slab, Address, Dirty)
AMEM_CARRY(Placed, Allocation, Slab, Offset, Touched)
AMEM_CARRY(Backed, Allocation, Handle)
AMEM_CARRY(PartCleared, Slab, Offset, Bytes)

// ---- communicators -------------------------------------------------------------------------------------------------------

AMEM_CARRY(CommunicatorBegun, Communicator, Parent, How, Rank, Ranks)
AMEM_CARRY(CommunicatorReady, Communicator, Hash, Rank, Ranks, Device)
AMEM_CARRY(CommunicatorEnded, Communicator, How)
AMEM_CARRY(CommunicatorSuspended, Communicator, Suspended)

// ---- what was seen -------------------------------------------------------------------------------------------------------

AMEM_CARRY(VoteCast, Phase, Ok, Code, Message, Pool)
AMEM_CARRY(MemberHeard, Member, Kind, Phase, Voted, Ok, Rank, Pid, Asks)
AMEM_CARRY(ProcessSeen, Session, Pid, State, Where, Answer, ExitCode, WaitedNs)
AMEM_CARRY(ThreadSeen, Thread, Name, State, Where, Stack)
AMEM_CARRY(LaunchRefused, Call, Count)

// ---- pools ---------------------------------------------------------------------------------------------------------------

AMEM_CARRY(PoolOpened, Pool, Tag, Policy, Cycles)
AMEM_CARRY(PoolAllocated, Address, Bytes, Device, Backing, Offset)
AMEM_CARRY(PoolFreed, Address)

// ---- requests from outside -----------------------------------------------------------------------------------------------

AMEM_CARRY(RequestSeen, Request, Kind, ByPid, Target, AllTags)
AMEM_CARRY(SafepointReached, Request, Step)
AMEM_CARRY(RequestEnded, Request, Kind, Code, Message, Bytes)
AMEM_CARRY(Frozen, FromNs, ToNs, Bytes, MovedGpus)

}  // namespace amem::codec
