#include "ncclpatch/runtime/communicators.h"

#include "ncclpatch/runtime/runtime.h"

namespace amem {
namespace {

class CommunicatorJournal : public nccl::Observer {
 public:
  void Begun(const nccl::Communicator& c) override {
    Runtime::Get().Note(CommunicatorBegun{c.id, c.parent, c.how, c.rank, c.ranks});
  }
  void Ready(const nccl::Communicator& c) override {
    Runtime::Get().Note(CommunicatorReady{c.id, c.hash, c.rank, c.ranks, c.device});
  }
  void Suspended(CommunicatorId id, bool suspended) override { Runtime::Get().Note(CommunicatorSuspended{id, suspended}); }
  void Ended(CommunicatorId id, const char* how) override { Runtime::Get().Note(CommunicatorEnded{id, how}); }
};

}  // namespace

nccl::Observer* JournalOfCommunicators() {
  static auto* journal = new CommunicatorJournal;  // never destroyed, as the runtime
  return journal;
}

}  // namespace amem
