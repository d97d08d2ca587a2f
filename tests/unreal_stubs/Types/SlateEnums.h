#pragma once

namespace ETextCommit {
enum Type { Default, OnEnter, OnUserMovedFocus, OnCleared };
}
