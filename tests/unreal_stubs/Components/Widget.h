#pragma once

#include "CoreMinimal.h"

class UWidget : public UObject {};
