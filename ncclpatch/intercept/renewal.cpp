// AMEM_NETWORK=renew: what a pause asks of network cards, it asks of those that NCCL uses itself and of its plugins.
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ncclpatch/intercept/cards.h"
#include "ncclpatch/intercept/plugin_handles.h"
#include "ncclpatch/nccl/attribution.h"

namespace amem::intercept {
namespace {

class AllNetworks final : public Network {
 public:
  std::vector<Kept> Drain(const std::vector<RegionId>& regions, Deadline until) override {
    std::map<RegionId, TrafficGate*> gates;
    cards_.FindGates(regions, &gates);
    plugins_.FindGates(regions, &gates);
    for (const auto& [region, gate] : gates) shut_.insert(gate);  // first, so that Open finds them if memory runs out below
    std::map<TrafficGate*, std::string> busy = TrafficGate::Shut(shut_, until);
    std::vector<Kept> kept;
    for (const auto& [region, gate] : gates)
      if (const std::string& why = busy[gate]; !why.empty()) kept.push_back({region, why});
    return kept;
  }
  Status Deregister(RegionId region) override {
    AMEM_TRY(cards_.Deregister(region));
    return plugins_.Deregister(region);
  }
  Status Register(RegionId region) override {
    AMEM_TRY(cards_.Register(region));
    return plugins_.Register(region);
  }
  void Open() override {
    for (TrafficGate* const gate : std::exchange(shut_, {})) gate->Reopen();
  }

 private:
  Cards& cards_ = Forever<Cards>();
  PluginHandles& plugins_ = Forever<PluginHandles>();
  std::set<TrafficGate*> shut_;  // or were to be; they live for ever
};

}  // namespace

Network* Renew() {
  Forever<Cards>().Begin();
  Forever<PluginHandles>().Begin();
  static auto* const tables = new std::vector(Tables().begin(), Tables().end());
  tables->push_back(CountedCardReplacements());
  static const replacements::Tables all(*tables);
  replacements::Install(all);
  nccl::TrackServiceThreads();
  nccl::SetJoinObserver(&TrafficGate::ThreadIsJoined);
  return &Forever<AllNetworks>();
}

}  // namespace amem::intercept
