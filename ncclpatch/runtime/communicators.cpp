#include "ncclpatch/runtime/communicators.h"

#include "ncclpatch/runtime/runtime.h"

namespace amem {
namespace {

class Journal : public nccl::Observer {
 public:
  void Begun(const nccl::Communicator& /*communicator*/) override {}
  void Ready(const nccl::Communicator& /*communicator*/) override {}
  void Ended(CommunicatorId /*id*/, const char* /*how*/) override {}
};

}  // namespace

nccl::Observer* JournalOfCommunicators() {
  static auto* journal = new Journal;
  return journal;
}

}  // namespace amem
