#include "tests/world/settings.h"

#include <fmt/format.h>

namespace amem::world {

namespace {

Deadlines DeadlinesOf(const Settings& settings) {
  return Deadlines(std::chrono::milliseconds((settings.absences ? 2000 : 8000) * kSlower));
}

}  // namespace

Settings SettingsOf(std::uint64_t seed, bool processes, bool between_launches) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint64_t below) { return random() % below; };
  Settings settings;
  settings.seed = seed;
  settings.ranks = static_cast<int>((processes ? 2 : 1) + pick(3));
  settings.threads = static_cast<int>(1 + pick(3));
  settings.faults = pick(3) == 0;
  settings.absences = pick(4) == 0;
  settings.pins_ahead = pick(2) == 0;
  settings.life = std::chrono::milliseconds(600 * kSlower + pick(1200 * kSlower));
  settings.session.layout = pick(2) == 0 ? Layout::kSlab : Layout::kDirect;
  settings.session.compare = pick(4) == 0;
  settings.session.slab_bytes = Bytes{2} << 20;
  settings.session.user_memory = pick(2) == 0 ? UserMemory::kKeep : UserMemory::kRelease;
  settings.session.deadlines = DeadlinesOf(settings);
  settings.starves = processes && pick(3) == 0;
  settings.shortages = processes && pick(4) == 0;
  settings.stops = processes && pick(3) == 0;
  settings.all_between_launches = between_launches;
  settings.between_launches = processes && (pick(5) == 0 || between_launches);
  if (settings.between_launches) {
    settings.absences = settings.starves = settings.shortages = settings.stops = false;
    settings.session.user_memory = UserMemory::kKeep;  // the program runs on, and uses it
    settings.session.deadlines = Deadlines(std::chrono::milliseconds(8000 * kSlower));
  }
  if (!settings.pins_ahead) settings.session.pinned_bytes = settings.session.pool_pinned_bytes = 0;
  return settings;
}

void Choose(Settings& settings, const std::string& with, const std::string& without) {
  settings.with = with;
  settings.without = without;
  const auto has = [&](std::string_view what) { return with.find(what) != std::string::npos; };
  settings.faults = settings.faults || has("faults");
  settings.absences = settings.absences || has("absences");
  settings.stops = settings.stops || has("stops");
  settings.shortages = settings.shortages && !settings.Without("shortages");
  settings.starves = settings.starves && !settings.Without("starves");
  settings.session.deadlines = DeadlinesOf(settings);
}

std::string Describe(const Settings& s) {
  return fmt::format("{} {} of {} threads, layout {}, {} ms{}{}{}{}{}{}{}", s.ranks,
                     s.directory.empty() ? "ranks" : "processes", s.threads,
                     s.session.layout == Layout::kSlab ? "slab" : "direct", s.life.count(), s.faults ? ", faults" : "",
                     s.absences ? ", absences" : "", s.starves ? ", want of descriptors" : "", s.shortages ? ", shortages" : "",
                     s.stops ? ", stops" : "", s.between_launches ? ", stopped between launches" : "",
                     s.pins_ahead ? "" : ", nothing pinned ahead");
}

}  // namespace amem::world
