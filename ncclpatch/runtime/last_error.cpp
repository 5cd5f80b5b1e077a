#include "ncclpatch/runtime/last_error.h"

#include <mutex>
#include <optional>
#include <string_view>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/runtime/border.h"

struct ncclComm;

namespace amem::last_error {
namespace {

struct Refusal {
  std::mutex mutex;
  std::string message;  // empty: none, or NCCL has failed otherwise since
  // NCCL's own text when this was first asked for: of the failure that the refusal led to.
  std::optional<std::string> nccls;
};

// The text of both; null: there is no refusal that NCCL's text belongs to.
const char* TextOfRefusal(std::string_view nccls) {
  thread_local std::string text;  // valid until this thread asks again
  auto& refusal = Forever<Refusal>();
  const std::lock_guard lock(refusal.mutex);
  if (refusal.message.empty()) return nullptr;
  if (!refusal.nccls) refusal.nccls = nccls;
  if (*refusal.nccls != nccls) return refusal.message.clear(), nullptr;
  text = "AMem: " + refusal.message;
  if (!nccls.empty()) text.append("\nNCCL: ").append(nccls);
  return text.c_str();
}

struct GetLastError {
  static constexpr const char* kName = "ncclGetLastError";
  using Function = const char*(ncclComm*);
  template <class Real>
  static const char* Call(std::size_t /*library*/, Real real, ncclComm* comm) {
    const char* const nccls = real(comm);
    try {
      const char* const text = TextOfRefusal(nccls == nullptr ? "" : nccls);
      return text != nullptr ? text : nccls;
    } catch (...) {  // no memory for the text
      return nccls;
    }
  }
};

}  // namespace

void NoteRefusal(const std::string& message) noexcept {
  try {
    LastError() = message;
    auto& refusal = Forever<Refusal>();
    const std::lock_guard lock(refusal.mutex);
    refusal.message = message;
    refusal.nccls.reset();
  } catch (...) {
  }
}

redirects::Table Calls() { return redirects::MakeTable<GetLastError>(); }

}  // namespace amem::last_error
